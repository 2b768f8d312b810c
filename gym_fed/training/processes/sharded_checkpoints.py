"""Checkpoints of models that are split while loading (FSDP2, tensor parallelism); transformers cannot resume them.

Weights and optimiser state are gathered to whole tensors by torch's distributed checkpoints and written by one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from gym_fed.training.processes.group import is_main

_WEIGHTS, _OPTIMIZER, _SCHEDULER = "trained.pt", "optimizer.pt", "scheduler.pt"


class AnyDeviceParallelism(ParallelismConfig):  # type: ignore[misc]  # untyped
    """Makes accelerate accept processes that share rows; its own check allows only GPUs, although gloo works too."""

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Accept every accelerator: the processes are joined already."""


_Trainer: Any = object  # what the mix-in is placed before


class ShardedCheckpoints(_Trainer):  # type: ignore[misc]
    """A mix-in for trainers; does nothing for models that every process holds whole."""

    is_distributed_loading_by_transformers: bool
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights = get_model_state_dict(self.model, options=options)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        if is_main():
            folder = Path(output_dir)
            torch.save(weights, folder / _WEIGHTS)
            torch.save(optimizer, folder / _OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), folder / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = _read(resume_from_checkpoint, _WEIGHTS)
        set_model_state_dict(self.model, weights, options=_spread(strict=False))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_distributed_loading_by_transformers or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = _read(checkpoint, _OPTIMIZER)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=_spread(strict=True))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))


def _spread(*, strict: bool) -> StateDictOptions:
    """Send whole tensors of the main process to every process's part."""
    return StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=strict, ignore_frozen_params=True
    )


def _read(folder: str, name: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if is_main():
        state = torch.load(Path(folder) / name, weights_only=True, map_location="cpu")
    return state
