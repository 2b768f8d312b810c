"""A PEFT adapter that names its base; vLLM and SGLang load it with that base."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapters import BASE_ADAPTERS, write_base_adapters
from gym_fed.base.models import resolve
from gym_fed.export.formats.base import ExportFormat, Options
from gym_fed.export.source import Source


class PeftAdapter(ExportFormat):
    """An adapter folder, without the base that it was trained on."""

    name = "adapter"
    reader = "peft"
    reader_libraries = ("peft",)
    tried = "LoRA, DoRA; read back by PEFT"
    untried = "models that read images"
    takes_rank = True

    def check(self, source: Source) -> None:
        if not source.adapted and source.delta is None:
            raise self.refusal(source, "has no adapter and no delta", "export it as huggingface or delta")

    def use(self, path: Path) -> str:
        return shlex.join(("gym", "chat", str(path)))

    def write(self, source: Source, target: Path, options: Options) -> None:
        from gym_fed.base.modeling.adapter_saving import cast_adapter, save_adapter
        from gym_fed.base.modeling.rope import write_base_changes

        model = _on_the_base(source, options)
        with source.saving(model):
            save_adapter(model, target, source.base)
        if options.dtype is not None:
            cast_adapter(target, options.dtype)
        write_base_adapters(source.below, target)
        if source.base_changed:
            write_base_changes(model.get_base_model(), target)
        source.write_companions(target)

    def facts(self, source: Source, options: Options) -> dict[str, Any]:
        from gym_fed.export.nearest import lora_facts

        if source.delta is not None:
            return lora_facts(source, options)
        unsupported = _unsupported_by_vllm(source.model.active_peft_config)
        note = f"vLLM refuses adapters with {unsupported}: for vLLM, export as huggingface"
        return {"notes": [note]} if unsupported else {}

    def expected(self, source: Source, target: Path, options: Options) -> Any:
        import torch

        model = _on_the_base(source, options)
        if options.dtype is None:
            return model
        rounded = copy.deepcopy(model)
        for name, value in rounded.named_parameters():
            if "base_layer" not in name and ("lora_" in name or "modules_to_save" in name):
                value.data = value.data.to(getattr(torch, options.dtype)).to(value.dtype)
        return rounded

    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        below = sorted((target / BASE_ADAPTERS).glob("*"), key=lambda entry: int(entry.name))
        return {"model": resolve(str(source.base)), "adapters": [*map(str, below), str(target)]}


def _unsupported_by_vllm(config: Any) -> str:
    """Return the settings of an adapter that vLLM cannot load (``PEFTHelper``); empty if it can load all."""
    if config.peft_type != "LORA":
        return str(getattr(config.peft_type, "value", config.peft_type))
    parts = {
        "DoRA": config.use_dora,
        f"bias: {config.bias}": config.bias != "none",
        "modules_to_save": config.modules_to_save,
    }
    return ", ".join(part for part, holds in parts.items() if holds)


def _on_the_base(source: Source, options: Options) -> Any:
    """Return the base with an adapter: the source's own, or the factors of its delta.

    Raises:
        GymError: See ``require_delta_options`` and ``lora_model``.
    """
    from gym_fed.export.nearest import lora_model, require_delta_options

    require_delta_options(source, options)
    if source.delta is not None:
        return lora_model(source, options.rank, options.report)
    return source.model
