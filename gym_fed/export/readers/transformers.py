"""Read model folders with transformers, adapters with PEFT, and deltas with gym-fed on their base.

AWQ and GPTQ folders are unpacked by gym-fed first, since gptqmodel cannot be installed alongside it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.vocabulary import text_tokenizer
from gym_fed.core.bounded.chat import bind_templates
from gym_fed.export.readers.reading import SPECIAL, LoadedExport

LIBRARIES = ("torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
"""Libraries that the reading process imports before its job arrives."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the model in float32, with its tokenizer.

    With ``parts["packed"]`` the packed weights of ``parts["model"]`` are rounded to the dtype of their scales.
    """
    if not parts.get("packed"):
        return TransformersExport(*loaded(parts), hashed=parts.get("hashed", False))
    from gym_fed.base.imports.quantised import QuantisedImporter

    model = Path(parts["model"])
    with tempfile.TemporaryDirectory(prefix="gym-export-", dir=model.parent) as folder:
        QuantisedImporter().write(model, Path(folder), lambda _done, _all: None)
        return TransformersExport(*loaded({"model": folder}))


def loaded(parts: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model in float32, and its tokenizer (or processor)."""
    import torch
    from transformers import AutoProcessor, AutoTokenizer

    from gym_fed.base.modeling.loading import load_weights
    from gym_fed.base.modeling.model_class import class_for, reads_media

    folder = Path(parts["model"])
    model = load_weights(class_for(folder), str(folder), {"dtype": torch.float32}, name=folder.name)
    adapters = parts.get("adapters", [])
    if adapters:
        from peft import PeftModel

        for below in adapters[:-1]:
            model = PeftModel.from_pretrained(model, below).merge_and_unload()
        model = PeftModel.from_pretrained(model, adapters[-1])
    extras = adapters[-1] if adapters else folder
    reader: Any = AutoProcessor if reads_media(folder) else AutoTokenizer
    tokenizer = reader.from_pretrained(extras, local_files_only=True, trust_remote_code=False)
    bind_templates(tokenizer, str(extras))
    if "delta" in parts:
        from gym_fed.delta.file import DeltaFile, apply_delta
        from gym_fed.delta.vocabulary import tuned_tokenizer

        with DeltaFile.open(Path(parts["delta"]), added_tokens=True) as opened:
            apply_delta(model, opened)
            tokenizer = tuned_tokenizer(tokenizer, opened)
    return model.eval(), tokenizer


class TransformersExport(LoadedExport):
    """A transformers model and its tokenizer, read from an export or already in memory.

    Args:
        model: The model.
        tokenizer: Its tokenizer, or a processor.
        hashed: Whether to compute a digest of all weights, to compare them.
    """

    def __init__(self, model: Any, tokenizer: Any, *, hashed: bool = False) -> None:
        self._model, self._hashed = model, hashed
        self._tokenizer = text_tokenizer(tokenizer)

    def ids(self, prompt: str) -> list[int]:
        plain = self._tokenizer
        if plain.chat_template is None:
            return list(plain(prompt)["input_ids"])
        message = [{"role": "user", "content": prompt}]
        text = plain.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(plain(text, add_special_tokens=False)["input_ids"])

    def logits(self, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            inputs = torch.tensor([ids], device=self._model.device)
            return self._model(input_ids=inputs, use_cache=False).logits[0].float().cpu()

    def text_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def special_ids(self) -> dict[str, int]:
        ids = {name: getattr(self._tokenizer, f"{name}_token_id", None) for name in SPECIAL}
        return {name: number for name, number in ids.items() if number is not None}

    def chat_template(self) -> str | None:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def weights_digest(self) -> str | None:
        from gym_fed.delta.base import tensors_digest

        return tensors_digest(self._model) if self._hashed else None
