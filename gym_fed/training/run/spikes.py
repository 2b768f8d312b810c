"""Detect loss spikes, roll back to a checkpoint, and skip the batches since then.

Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", section 5.1. Skipped batches are recorded in
``rollbacks.json`` of the run folder, so that a killed and resumed run skips the same ones.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gym_fed.config.train.run import LossSpikes
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.files import write_atomically
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.processes.group import is_main


def check_spikes(config: TrainingConfig) -> None:
    """Refuse ``loss_spikes`` if the algorithm's loss does not measure how well the model fits its rows."""
    measures = config.loss_spikes is None or ALGORITHMS.new(config.algorithm).loss_measures_rows(config)
    reason = f"loss_spikes: the loss of {config.algorithm} does not measure how well the model fits its rows"
    refuse_first((not measures, reason, "remove the section"))


class Diverged(GymError):
    """Raised if the loss is not finite or spikes repeatedly."""


def require_finite(model: Any, step: int) -> None:
    """Refuse final weights that are not finite. The loss of the last step was computed before its update.

    Raises:
        Diverged: With the name of a weight.
    """
    import torch

    for name, weight in model.named_parameters():
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        if local.requires_grad and not bool(torch.isfinite(local).all()):
            reason = f"{name} is not finite after step {step}: training has diverged"
            raise Diverged(ErrorCode.DATA_INVALID, reason, "lower learning_rate, or set max_grad_norm")


@dataclass(frozen=True)
class Spike:
    """A step at which the loss or the gradient norm jumped.

    ``usual`` is the median of the previous steps; None if the value is not finite.
    """

    step: int
    metric: str
    value: str
    usual: float | None


class SpikeWatch:
    """Checks every step for a spike; if ``rollback`` is off, spikes are recorded in ``spikes.json``."""

    def __init__(self, settings: LossSpikes, folder: Path) -> None:
        self.settings = settings
        self._file = folder / "spikes.json"

    def check(
        self,
        step: int,
        loss: float,
        losses: Sequence[float],
        grad_norm: float | None,
        grad_norms: Sequence[float],
    ) -> Spike | None:
        """Return the spike at ``step``, if any; ``losses`` and ``grad_norms`` are those of the previous steps."""
        spike = self._detect(step, "loss", loss, losses, self.settings.factor)
        if spike is None and self.settings.grad_norm_factor is not None and grad_norm is not None:
            factor = self.settings.grad_norm_factor
            spike = self._detect(step, "grad_norm", float(grad_norm), grad_norms, factor)
        if spike is not None and not self.settings.rollback and is_main():
            recorded = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else []
            earlier = [old for old in recorded if old["step"] < step]
            write_atomically(self._file, f"{json.dumps([*earlier, asdict(spike)], indent=2)}\n".encode())
        return spike

    def _detect(
        self, step: int, metric: str, value: float, before: Sequence[float], factor: float
    ) -> Spike | None:
        if not math.isfinite(value):
            return Spike(step, metric, str(value), None)
        if len(before) < self.settings.window:
            return None
        usual = statistics.median(before[-self.settings.window :])
        return Spike(step, metric, str(value), usual) if value > factor * usual else None


class Rollbacks:
    """The rollbacks of a run so far, and the order of batches that results from them."""

    def __init__(self, settings: LossSpikes, folder: Path) -> None:
        self._settings = settings
        self._file = folder / "rollbacks.json"
        self.entries: list[dict[str, Any]] = (
            json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else []
        )

    def add(self, spike: Spike, to_step: int | None, trainer: Any) -> None:
        """Record a rollback to ``to_step``, so that the trainer's next dataloader skips the batches after it.

        Raises:
            Diverged: After too many rollbacks, or if there is no checkpoint.
        """
        event = f"{spike.metric} is {spike.value} at step {spike.step}"
        if to_step is None:
            reason = f"{event}, before the first checkpoint: training has diverged"
            raise Diverged(ErrorCode.DATA_INVALID, reason, "lower learning_rate, or check the first rows")
        if len(self.entries) >= self._settings.max_rollbacks:
            steps = ", ".join(str(entry["step"]) for entry in self.entries)
            reason = f"{event}; rollbacks so far: {len(self.entries)} (at steps {steps})"
            remedy = "lower learning_rate, check the rows, or raise loss_spikes.max_rollbacks"
            raise Diverged(ErrorCode.DATA_INVALID, reason, remedy)
        skipped = _skipped_batches(to_step, spike.step, len(trainer.get_train_dataloader()), trainer.args)
        self.entries.append({**asdict(spike), "to_step": to_step, "skipped": skipped})
        if is_main():
            write_atomically(self._file, f"{json.dumps(self.entries, indent=2)}\n".encode())

    def wrap(self, loader: Any) -> Any:
        """Make a dataloader skip the recorded batches, and return it. Used as ``LocalOnly.wrap_dataloader``."""
        batches = loader.batch_sampler
        shards = getattr(batches, "num_processes", 1)
        batches = getattr(batches, "batch_sampler", batches)
        ranges = [(part["epoch"], part["from"], part["until"]) for e in self.entries for part in e["skipped"]]
        batches.sampler = SkippingSampler(batches.sampler, batches.batch_size * shards, ranges)
        return loader


class SkippingSampler:
    """A sampler that skips batches, and repeats the first rows of the epoch at its end.

    Its length, and therefore the number of steps, the epochs and the learning rates, are unchanged. Batches before a
    skipped range do not move, so that a resumed run continues at the right one.

    Args:
        inner: The original sampler.
        batch_size: Number of rows per batch, over all processes.
        ranges: ``(epoch, from, until)``: batch indices in the order that remains after the previous ranges are removed.
    """

    def __init__(self, inner: Any, batch_size: int, ranges: Sequence[tuple[int, int, int]]) -> None:
        self._inner = inner
        self._batch_size = batch_size
        self._ranges = ranges
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch
        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[int]:
        order = [int(index) for index in self._inner]
        for epoch, start, end in self._ranges:
            if epoch == self.epoch:
                order = _remove_range(order, start * self._batch_size, end * self._batch_size)
        return iter(order)


def _remove_range(order: list[int], start: int, end: int) -> list[int]:
    remaining = order[:start] + order[end:]
    if not remaining:
        reason = "loss_spikes: every batch of an epoch would be skipped"
        raise Diverged(ErrorCode.DATA_INVALID, reason, "lower learning_rate or save_steps")
    missing = len(order) - len(remaining)
    return remaining + (remaining * math.ceil(missing / len(remaining)))[:missing]


def _skipped_batches(after: int, until: int, per_epoch: int, args: Any) -> list[dict[str, int]]:
    """Return the batches of steps ``after + 1`` to ``until``, one range per epoch."""
    group = args.gradient_accumulation_steps
    steps = max(math.ceil(per_epoch / group), 1)
    ranges: list[dict[str, int]] = []
    for step in range(after, until):
        epoch, index = divmod(step, steps)
        start, end = index * group, min((index + 1) * group, per_epoch)
        if ranges and ranges[-1]["epoch"] == epoch:
            ranges[-1]["until"] = end
        else:
            ranges.append({"epoch": epoch, "from": start, "until": end})
    return ranges
