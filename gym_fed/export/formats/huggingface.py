"""A model folder of Hugging Face's: everything merged into the weights, which transformers, vLLM and llama.cpp read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.source import Source
from gym_fed.models import quiet_loading


class HuggingFace(ExportFormat):
    """safetensors in shards, config, generation config, tokenizer with its chat template, licence."""

    name = "huggingface"
    merges = True
    tried = "full, LoRA, DoRA; Qwen3, Llama, a mixture of experts; float32, bfloat16, float16"
    untried = "models of more than one shard's default size"

    def write(self, source: Source, target: Path, options: Options) -> None:
        with quiet_loading():
            self.expected(source, target, options).save_pretrained(
                str(target), max_shard_size=options.shard_size
            )
        source.write_beside(target)

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        import torch

        whole = source.whole()
        if options.dtype is None or str(whole.dtype) == f"torch.{options.dtype}":
            return whole
        rounded, wanted = copy.deepcopy(whole), getattr(torch, options.dtype)
        for value in rounded.state_dict(
            keep_vars=True
        ).values():  # rotary frequencies are never saved, and stay
            if value.is_floating_point():
                value.data = value.data.to(wanted)
        return rounded

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        return {"model": str(target)}
