"""Plan a run from its config: memory by component, steps, and time on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.training import DataConfig, TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.doctor.checks.devices import total_memory_bytes
from gym_fed.training.planning.duration import calibrate, step_operations, step_seconds
from gym_fed.training.planning.memory import Memory, memory_of, tokens_of_batch
from gym_fed.training.planning.sizes import Sizes, sizes_of


@dataclass(frozen=True)
class RunPlan:
    """The requirements of a run.

    Attributes:
        sizes: Its weights.
        memory: Memory of one process.
        device: Where it would run.
        available: Bytes that the device has; None where this machine lacks it.
        tokens: Maximum tokens per step.
        operations: Floating-point operations of one step.
        steps: Steps of the run; None if the number of rows is unknown.
        seconds: Seconds per step on this machine; None if the model is too large to be tried here.
    """

    sizes: Sizes
    memory: Memory
    device: str
    available: int | None
    tokens: int
    operations: float
    steps: int | None
    seconds: float | None

    def facts(self) -> dict[str, Any]:
        """The plan for ``--json``."""
        return {
            "weights": self.sizes.total,
            "trained": self.sizes.num_trained,
            "device": self.device,
            "memory": {name: round(value) for name, value in self.memory.parts().items()},
            "peak_bytes": round(self.memory.peak),
            "available_bytes": self.available,
            "tokens_per_step": self.tokens,
            "operations_per_step": self.operations,
            "steps": self.steps,
            "seconds_per_step": self.seconds,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The plan as text."""
        trained = self.sizes.num_trained
        whole = self.sizes.frozen + trained
        lines = [("weights", f"{self.sizes.total:,}"), ("trained", f"{trained:,} ({trained / whole:.2%})")]
        lines += [(f"  {name}", gib(value)) for name, value in self.memory.parts().items() if value]
        has = "not on this machine" if self.available is None else f"which has {gib(self.available)}"
        lines += [
            ("memory at the peak", f"{gib(self.memory.peak)} on {self.device}, {has}"),
            ("tokens per step", f"{self.tokens:,} at most"),
            ("operations per step", f"{self.operations:.2e}"),
            ("steps", "as many as the rows give" if self.steps is None else f"{self.steps:,}"),
        ]
        if self.available is None:
            lines.append(("time", f"not tried: this machine has no {self.device}"))
        elif self.seconds is None:
            lines.append(("time", "not tried: its blocks are too large for that here, or it reads images"))
        else:
            lines.append(("time per step", f"{self.seconds:.2f} s, calibrated on this machine"))
            if self.steps is not None:
                lines.append(("time", duration(self.seconds * self.steps)))
        return lines


def plan_run(
    config: TrainingConfig, *, processes: int = 1, device: str | None = None, timed: bool = True
) -> RunPlan:
    """Estimate the requirements of ``config``. No weights are read.

    Args:
        config: The run.
        processes: How many processes share it.
        device: ``cpu``, ``cuda`` or ``mps``, of which memory is estimated; by default that of the run.
        timed: Whether a few blocks are run to see how fast this machine is.

    Raises:
        GymError: See ``sizes_of``.
    """
    here = _device_of(config, device)
    kind = device or str(config.device).partition(":")[0] if here is None else here.type
    sizes = sizes_of(config)
    memory = memory_of(config, sizes, device=kind, processes=processes)
    measured = calibrate(config, sizes, here) if timed and here is not None else None
    return RunPlan(
        sizes,
        memory,
        kind,
        None if here is None else available_bytes(here),
        tokens_of_batch(config) * config.gradient_accumulation_steps,
        step_operations(config, sizes),
        steps_of(config, processes),
        None if measured is None else step_seconds(config, sizes, measured),
    )


def steps_of(config: TrainingConfig, processes: int = 1) -> int | None:
    """Optimiser steps of a run; None if the rows are on the Hub and their number is unknown."""
    if config.max_steps is not None:
        return config.max_steps
    counts = [_rows_of(source) for source in config.data]
    if None in counts or not counts:
        return None
    rows = sum(count for count in counts if count is not None)
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
    if ALGORITHMS.type_of(config.algorithm).generates:
        batch = max(batch // config.chosen_sections()[config.algorithm].num_generations, 1)
    return max(round(-(-rows // batch) * config.num_train_epochs), 1)


def _rows_of(source: DataConfig) -> int | None:
    from gym_fed.config.train.catalogue import catalogue_entry
    from gym_fed.data.sources import source_rows

    if source.hub is not None or source.name is not None:
        stated = None if source.name is None else catalogue_entry(source.name).rows
        if source.split is not None or stated is None:
            return source.num_examples
        return round(min(stated, source.num_examples or stated) * source.weight)
    return round(sum(1 for _ in source_rows(source)) * source.weight)


def _device_of(config: TrainingConfig, kind: str | None) -> Any:
    """The run's device, or that of ``kind``; None if this machine lacks it, which a plan does not require."""
    try:
        return pick_device(kind or config.device)
    except GymError:
        return None


def available_bytes(device: Any) -> int:
    """Total memory of a device in bytes; for a CPU at most the container's limit."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_memory_bytes()


def gib(value: float) -> str:
    """Format bytes in GiB, or in MiB if small."""
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 28 else f"{value / (1 << 20):.1f} MiB"


def duration(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{counted(round(seconds), 'second')}"
