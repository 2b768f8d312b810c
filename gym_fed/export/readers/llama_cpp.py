"""Reads GGUF files with llama.cpp itself (llama-cpp-python): its tokenizer, its forward, the template in the file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gym_fed.export.readers.program import rendered
from gym_fed.export.readers.reading import POSITIONS, LoadedExport

LIBRARIES = ("torch", "llama_cpp")
"""Libraries that the reading process imports before its job arrives."""
_CONTEXT = 2 * POSITIONS
"""Maximum number of tokens of one sequence."""


def load(parts: dict[str, Any]) -> LoadedExport:
    """Load the model of ``parts["file"]``."""
    return LlamaCppExport(parts["file"])


class LlamaCppExport(LoadedExport):
    """A file that llama.cpp has mapped, with a float32 KV cache.

    Args:
        file: The path of a model.
        lora_path: The path of an adapter for it.
    """

    def __init__(self, file: str, lora_path: str | None = None) -> None:
        import torch

        llama_cpp = import_module("llama_cpp")
        threads = torch.get_num_threads()
        self._model = llama_cpp.Llama(
            file,
            lora_path=lora_path,
            n_ctx=_CONTEXT,
            n_batch=_CONTEXT,
            n_ubatch=_CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            logits_all=True,
            verbose=False,
        )
        self._read: list[int] = []

    def ids(self, prompt: str) -> list[int]:
        template = self._model.metadata.get("tokenizer.chat_template")
        if template is None:
            return self._plain_ids(prompt)
        special = {
            f"{name}_token": self._model._model.token_get_text(number)
            for name, number in self.special_ids().items()
        }
        text = rendered(template, prompt, special)
        return list(self._model.tokenize(text.encode(), add_bos=False, special=True))

    def logits(self, ids: list[int]) -> Any:
        import torch

        known = self._read
        if not known or ids[: len(known)] != known:
            self._model.reset()
            known = []
        self._model.eval(ids[len(known) :])
        self._read = list(ids)
        return torch.from_numpy(self._model.scores[: len(ids)].copy())

    def text_ids(self, text: str) -> list[int] | None:
        return self._plain_ids(text)

    def special_ids(self) -> dict[str, int]:
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        ids = {
            name: self._model.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()
        }
        return {name: int(number) for name, number in ids.items() if number is not None}

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._model.tokenize(text.encode(), add_bos=True, special=True))
