"""A Hugging Face model folder with everything merged into the weights, for transformers, vLLM and llama.cpp."""

from __future__ import annotations

import copy
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from gym_fed.base.models import quiet_loading
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.source import Source, cast


class HuggingFace(ExportFormat):
    """A folder of safetensors shards, config, generation config, tokenizer with its chat template, and licence."""

    name = "huggingface"
    merges = True
    copies_writing = 1.0
    copies_reading = 1.0
    tried = "full, LoRA, DoRA; Qwen3, Llama, a mixture of experts; float32, bfloat16, float16"
    untried = "models of more than one shard's default size"

    def of_source(self, source: Source, options: Options) -> Options:
        return options if options.dtype else replace(options, dtype=source.precise_dtype())

    def changes(self, source: Source, options: Options) -> bool:
        return super().changes(source, options) or (
            source.owned and options.dtype is not None and not _is_exact_in(source.model, options.dtype)
        )

    def use(self, path: Path) -> str:
        return shlex.join(("gym", "chat", str(path)))

    def write(self, source: Source, target: Path, options: Options) -> None:
        with quiet_loading():
            self._rounded(source, options).save_pretrained(str(target), max_shard_size=options.shard_size)
        source.write_companions(target)

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        return self._rounded(source, options)

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {"model": str(target), "hashed": True}

    def _rounded(self, source: Source, options: Options) -> Any:
        """Return the merged model in ``dtype``; the model in memory, not a copy, if nothing else uses it."""
        model = source.whole()
        if options.dtype is None or str(model.dtype) == f"torch.{options.dtype}":
            return model
        return cast(model if source.owned else copy.deepcopy(model), options.dtype)


def _is_exact_in(model: Any, dtype: str) -> bool:
    """Return True if rounding to ``dtype`` changes no weight."""
    import torch

    kind = getattr(torch, dtype)
    values = (value for value in model.state_dict().values() if value.is_floating_point())
    return all(torch.equal(value.to(kind).to(value.dtype), value) for value in values)
