"""A PEFT adapter that names its base; vLLM and SGLang load it beside that base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.source import Source
from gym_fed.modeling.adapters import BASE_ADAPTERS, write_base_adapters
from gym_fed.models import resolve


class PeftAdapter(ExportFormat):
    """What was trained beside the base, alone."""

    name = "adapter"
    reader = "peft"
    tried = "LoRA, DoRA; read back by PEFT"
    untried = "models that read images"

    def check(self, source: Source) -> None:
        if not source.adapted:
            raise GymError(
                ErrorCode.USAGE,
                f"format adapter: {source.name} has no adapter",
                "export it as huggingface or delta",
            )

    def write(self, source: Source, target: Path, options: Options) -> None:
        from gym_fed.modeling.rope import write_base_changes
        from gym_fed.training.model.saving import cast_adapter
        from gym_fed.training.tuning._peft import save_adapter
        from gym_fed.training.tuning._starts import start_subtracted

        with start_subtracted(source.model):
            save_adapter(source.model, target, source.base)
        if options.dtype is not None:
            cast_adapter(target, options.dtype)
        write_base_adapters(source.below, target)
        if source.base_changed:
            write_base_changes(source.model.get_base_model(), target)
        source.write_beside(target)

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        import torch

        if options.dtype is None:
            return source.model
        rounded = copy.deepcopy(source.model)
        for name, value in rounded.named_parameters():
            if "base_layer" not in name and ("lora_" in name or "modules_to_save" in name):
                value.data = value.data.to(getattr(torch, options.dtype)).to(value.dtype)
        return rounded

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        below = sorted((target / BASE_ADAPTERS).glob("*"), key=lambda entry: int(entry.name))
        return {"model": resolve(str(source.base)), "adapters": [*map(str, below), str(target)]}
