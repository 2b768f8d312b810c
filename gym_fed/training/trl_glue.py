"""Use TRL's trainers without side effects: no telemetry, no model cards, no patches left on the model.

Also write checkpoints of models that are sharded while loading (FSDP2, tensor parallelism), because transformers cannot
resume from its own: torch gathers the weights and the optimiser state to whole tensors, and one process writes them.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.training.model.output_head import patched_output_heads
from gym_fed.training.processes.group import is_main
from gym_fed.training.processes.pipelined import Pipelined
from gym_fed.training.processes.shared_rows import RowsOfGroups

_ROUNDING = 1e-3
_WEIGHTS, _OPTIMIZER, _SCHEDULER = "trained.pt", "optimizer.pt", "scheduler.pt"
_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class LocalOnly(_Trainer):  # type: ignore[misc]
    """A mix-in for TRL trainers that sends no telemetry and writes no README into checkpoints.

    By default, TRL reports each new trainer to the Hub. The environment variable that disables this is read only when
    huggingface_hub is first imported, so a method is overridden instead.
    """

    optimizer: Any
    make_optimizer: Any = None
    """Set per instance: ``Callable[[model], Optimizer | None]``, which replaces the optimiser of transformers."""

    wrap_dataloader: Any = None
    """Set per instance: ``Callable[[DataLoader], DataLoader]`` that wraps the training dataloader."""

    def __init__(self, *args: Any, **named: Any) -> None:
        with patched_output_heads(type(self)):
            super().__init__(*args, **named)

    def _send_telemetry(self) -> None:
        """Send no telemetry."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no model card, since the run folder already contains the record."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimiser of the config, unless transformers creates it."""
        if self.make_optimizer is not None and self.optimizer is None:
            self.optimizer = self.make_optimizer(self.model if model is None else model)
        return super().create_optimizer(model)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return the trainer's sampler; for rows grouped by length, one whose order depends only on seed and epoch."""
        sampler = super()._get_train_sampler(dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return EpochLengthGroups(sampler, self.args.seed)
        return sampler

    def get_train_dataloader(self) -> Any:
        """Return the trainer's dataloader, wrapped with ``wrap_dataloader``."""
        loader = super().get_train_dataloader()
        return loader if self.wrap_dataloader is None else self.wrap_dataloader(loader)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse a checkpoint that does not fit the model, about which transformers would only warn."""
        model = self.model
        ignored = {
            *(getattr(model, "all_tied_weights_keys", None) or ()),
            *(model._keys_to_ignore_on_save or ()),
        }
        missing = sorted(set(load_result.missing_keys) - ignored)
        unexpected = sorted(set(load_result.unexpected_keys) - ignored)
        differences = []
        if missing:
            differences.append(f"lacks {counted(len(missing), 'weight')} of the model, such as {missing[0]}")
        if unexpected:
            differences.append(
                f"has {counted(len(unexpected), 'weight')} that the model does not have, such as {unexpected[0]}"
            )
        if differences:
            remedy = "delete the checkpoint, or start again in another output_dir"
            raise GymError(ErrorCode.MODEL_INVALID, f"the checkpoint {' and '.join(differences)}", remedy)
        if load_result.missing_keys:
            model.tie_weights()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint after checking the names of an adapter's weights, since PEFT ignores missing ones.

        Raises:
            GymError: ``MODEL_INVALID`` with a weight of the adapter that is missing from the checkpoint.
        """
        _require_adapter(self.model if model is None else model, Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)


@cache
def local(trainer: type) -> Any:
    """Return a TRL trainer class without side effects: ``local(SFTTrainer)(model=..., args=...)``."""
    from gym_fed.training.run.checkpoints import SealedCheckpoints

    bases = (SealedCheckpoints, LocalOnly, ShardedCheckpoints, RowsOfGroups, Pipelined, trainer)
    return type(f"Local{trainer.__name__}", bases, {"__doc__": f"{trainer.__name__}, local only."})


class ShardedCheckpoints(_Trainer):  # type: ignore[misc]
    """A mix-in for trainers of models that are sharded while loading; it has no effect on other trainers."""

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
    """Return the options that distribute the main process's whole tensors to all processes."""
    return StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=strict, ignore_frozen_params=True
    )


def _read(folder: str, name: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if is_main():
        state = torch.load(Path(folder) / name, weights_only=True, map_location="cpu")
    return state


class EpochLengthGroups(LengthGroupedSampler):
    """Orders rows like transformers' ``group_by_length``, but depends only on seed and epoch.

    In transformers, the order depends on the random state at the start of an epoch, which is not available to a run
    that resumes in the middle of the epoch.
    """

    def __init__(self, of: LengthGroupedSampler, seed: int) -> None:
        super().__init__(of.batch_size, lengths=of.lengths, generator=torch.Generator().manual_seed(seed))
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; accelerate's dataloader calls this before each epoch."""
        self.generator.manual_seed(self._seed + epoch)


def _require_adapter(model: Any, folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    if not hasattr(model, "peft_config") or not file.is_file():
        return
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(file, framework="pt") as weights:
        names = set(weights.keys())
    missing = sorted(get_peft_model_state_dict(model, save_embedding_layers=False).keys() - names)
    if missing:
        reason = f"{folder} lacks {counted(len(missing), 'weight')} of the adapter, such as {missing[0]}"
        remedy = "delete the checkpoint, or start again in another output_dir"
        raise GymError(ErrorCode.MODEL_INVALID, reason, remedy)


@contextmanager
def restore_after_run(model: Any) -> Iterator[None]:
    """Restore on exit what TRL changes on ``model``: ``forward``, ``use_cache``, dropout and tags."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    missing = object()
    before = base.__dict__.get("forward", missing)
    use_cache = getattr(base.config, "use_cache", missing)
    tags = copy.copy(getattr(base, "model_tags", None))
    dropouts = [(module, module.p) for module in model.modules() if hasattr(module, "p")]
    try:
        yield
    finally:
        if use_cache is not missing:
            base.config.use_cache = use_cache
        if hasattr(base, "model_tags"):
            base.model_tags = tags
        for module, share in dropouts:
            module.p = share
        if before is missing:
            base.__dict__.pop("forward", None)
        else:
            base.__dict__["forward"] = before


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Hide the progress bars of ``datasets`` and, without a terminal, also those of TRL."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disabled, before = are_progress_bars_disabled(), os.environ.get("TQDM_DISABLE")
    disable_progress_bars()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    try:
        yield
    finally:
        if not disabled:
            enable_progress_bars()
        if before is None:
            os.environ.pop("TQDM_DISABLE", None)
        else:
            os.environ["TQDM_DISABLE"] = before


def adapter_is_idle(model: Any, ids: list[int]) -> bool:
    """Return True if a PEFT model has the same logits as its base for ``ids``, apart from rounding."""
    batch, was_training = torch.tensor([ids], device=model.device), model.training
    model.eval()
    try:
        with torch.no_grad():
            adapted = model(input_ids=batch, use_cache=False).logits.float()
            with model.disable_adapter():
                base = model(input_ids=batch, use_cache=False).logits.float()
    finally:
        model.train(was_training)
    return bool((adapted - base).abs().max() <= _ROUNDING * base.abs().max())
