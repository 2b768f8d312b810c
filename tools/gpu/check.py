"""A check to run on a GPU, and the short training runs that most checks consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 4


@dataclass(frozen=True)
class Check:
    """A check to run on a GPU.

    Attributes:
        name: Name of its row in docs/support.md.
        what: What must be true, as written in the row.
        run: Runs the check on a device (``cuda`` or ``cpu``) in its own folder; returns the result as text, or raises.
        on_cpu: None if it also runs on a CPU; otherwise a pattern of the error on a CPU.
        packages: Required packages besides the project's own.
    """

    name: str
    what: str
    run: Callable[[str, Path], str]
    on_cpu: str | None = None
    packages: tuple[str, ...] = ()


def trained(device: str, folder: Path, **settings: Any) -> Any:
    """Train gym-nano for a few steps on a task and return the result; the loss must fall.

    Raises:
        AssertionError: If it does not fall, or if the model is not on the device.
    """
    from gym_fed import Trainer, TrainingConfig
    from gym_fed.data import generate

    values: dict[str, Any] = {
        "model": "gym-nano",
        "output_dir": folder / "run",
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "device": device,
        "save_final": False,
        **settings,
    }
    trainer = Trainer(TrainingConfig(**values))
    # A few rows are repeated, so the loss of a later pass must be below that of the first.
    result = trainer.train(generate("shout", 4) * STEPS)
    parts = list(result.model.parameters())
    assert {part.device.type for part in parts} == {device}, "the model was not on the device"
    assert result.losses[-1] < result.losses[0], f"losses {result.losses}"
    return result


def falls(**settings: Any) -> Callable[[str, Path], str]:
    """Return a check that trains with these settings."""

    def run(device: str, folder: Path) -> str:
        losses = trained(device, folder, **settings).losses
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"

    return run
