"""Reads GGUF adapters with llama.cpp on the base's own GGUF, or with ``gguf`` and PEFT on the base's folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gym_fed.export.readers.llama_cpp import LlamaCppExport
from gym_fed.export.readers.reading import LoadedExport
from gym_fed.export.readers.transformers import LIBRARIES as TRANSFORMERS_LIBRARIES
from gym_fed.export.readers.transformers import TransformersExport, loaded

LIBRARIES = (*TRANSFORMERS_LIBRARIES, "peft", "gguf")
"""Libraries that the reading process imports before its job arrives."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load ``parts["file"]`` on the base ``parts["model"]`` with ``parts["by"]``: ``llama_cpp_python`` or ``gguf``."""
    if parts["by"] == "llama_cpp_python":
        return LlamaCppAdapterExport(parts)
    model, tokenizer = loaded({"model": parts["model"]})
    tokenizer.chat_template = parts["chat_template"]
    return TransformersExport(with_adapter(model, Path(parts["file"])), tokenizer)


def with_adapter(model: Any, file: Path) -> Any:
    """Return the base with the factors of a GGUF adapter, applied by PEFT."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    from gym_fed.export.gguf.adapter import peft_state

    state, alpha = peft_state(file, model.config)
    modules = sorted({name.split("base_model.model.")[1].rpartition(".lora_")[0] for name in state})
    rank = next(len(values) for name, values in state.items() if ".lora_A." in name)
    wrapped: Any = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=int(alpha), target_modules=modules, task_type="CAUSAL_LM")
    )
    for layer in wrapped.modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] = alpha / rank
    result: Any = set_peft_model_state_dict(wrapped, state)
    if result.unexpected_keys:
        raise ValueError(f"{file.name}: {result.unexpected_keys[0]!r} is a factor of no weight of the base")
    return wrapped.eval()


class LlamaCppAdapterExport(LlamaCppExport):
    """llama.cpp with the adapter on the base, which is converted to f32 for this.

    The adapter's file contains no tokenizer, so token ids are those of the base's tokenizer.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
        from gym_fed.export.gguf.write import write_gguf
        from gym_fed.export.source import open_source

        base = open_source(parts["model"])
        base.tokenizer.chat_template = parts["chat_template"]
        self._tokens = TransformersExport(None, base.tokenizer)
        with tempfile.TemporaryDirectory(prefix="gym-export-", dir=Path(parts["file"]).parent) as folder:
            file = Path(folder) / "base.gguf"
            write_gguf(base, file, "f32")
            super().__init__(str(file), parts["file"])

    def ids(self, prompt: str) -> list[int]:
        return self._tokens.ids(prompt)

    def text_ids(self, text: str) -> list[int] | None:
        return None

    def special_ids(self) -> dict[str, int]:
        return {}
