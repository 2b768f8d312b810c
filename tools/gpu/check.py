"""One line of the check of a GPU, and the small runs that most of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 4


@dataclass(frozen=True)
class Check:
    """Something to be tried on a GPU.

    Attributes:
        name: Of the row in docs/support.md.
        what: What must be true, for the row.
        run: Tries it on a device (``cuda``, or ``cpu``) with a folder of its own; returns what was seen, or raises.
        on_cpu: ``None`` where it runs on a CPU, too; else words of the refusal there.
        packages: What must be installed, besides the project.
    """

    name: str
    what: str
    run: Callable[[str, Path], str]
    on_cpu: str | None = None
    packages: tuple[str, ...] = ()


def trained(device: str, folder: Path, **settings: Any) -> Any:
    """The result of a few steps of gym-nano on a task; the loss must fall.

    Raises:
        AssertionError: When it does not, or something ran elsewhere than on the device.
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
    # A few rows again and again: the loss of the second pass must be below that of the first.
    result = trainer.train(generate("shout", 4) * STEPS)
    parts = list(result.model.parameters())
    assert {part.device.type for part in parts} == {device}, "the model was not on the device"
    assert result.losses[-1] < result.losses[0], f"losses {result.losses}"
    return result


def falls(**settings: Any) -> Callable[[str, Path], str]:
    """A check that trains with these settings."""

    def run(device: str, folder: Path) -> str:
        losses = trained(device, folder, **settings).losses
        return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps"

    return run
