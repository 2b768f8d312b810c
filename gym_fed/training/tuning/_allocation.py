"""A callback that runs AdaLoRA's allocator after every step, and stores it in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

_STATE = "adalora.safetensors"


class Allocation(TrainerCallback):
    """A callback that runs AdaLoRA's allocator after each step, which changes the ranks.

    PEFT would remove masked triplets from saved files, which would then not fit a model of full rank. The rank pattern
    is therefore stored separately, and the files contain all triplets, with masked ones as zeros.
    """

    def __init__(self, model: Any, schedule: Callable[[int], tuple[int, int]]) -> None:
        self._tuner = model.base_model
        self._config = model.peft_config["default"]
        self._schedule = schedule
        self._pattern: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        total = state.max_steps
        self._config.total_step = total
        self._config.tinit, self._config.tfinal = self._schedule(total)
        if state.global_step:
            self._load(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._config.rank_pattern = self._pattern
        self._tuner.update_and_allocate(state.global_step + 1)
        self._pattern, self._config.rank_pattern = self._config.rank_pattern, None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import torch
        from safetensors.torch import save_file

        allocator = self._tuner.rankallocator
        tensors = {
            f"{kind}/{name}": value.contiguous()
            for kind in ("ipt", "exp_avg_ipt", "exp_avg_unc")
            for name, value in getattr(allocator, kind).items()
        }
        tensors |= {f"pattern/{name}": torch.tensor(mask) for name, mask in (self._pattern or {}).items()}
        save_file(tensors, str(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE))

    def _load(self, file: Path) -> None:
        from safetensors.torch import load_file

        device = next(self._tuner.parameters()).device
        pattern = {}
        for key, value in load_file(str(file)).items():
            kind, _, name = key.partition("/")
            if kind == "pattern":
                pattern[name] = value.tolist()
            else:
                getattr(self._tuner.rankallocator, kind)[name] = value.to(device)
        self._pattern = pattern or None
