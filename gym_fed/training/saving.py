"""Writes the end of a run: a model folder, or a PEFT adapter with the name of its base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.models import NANO
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.tuning import get_tuning


def save_final(
    trainer: Any, model: Any, tokenizer: Any, algorithm: Algorithm, config: TrainingConfig, folder: Path
) -> None:
    """Save beside the run's other files; a kill half-way leaves the run unfinished, never half a model.

    Args:
        trainer: What has run.
        model: The trained model or PEFT model; it is not changed.
        tokenizer: Saved with it.
        algorithm: Writes what it has beside the model.
        config: Gives the tuning method, ``save_dtype`` and the base's name.
        folder: The run folder.
    """
    part = folder / ".final.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    get_tuning(config.finetuning).save(model, config, part, _portable_name(config.model))
    algorithm.save(trainer, part)
    tokenizer.save_pretrained(str(part))
    for file in part.iterdir():
        file.replace(folder / file.name)
    part.rmdir()


def _portable_name(name: str | None) -> str | None:
    """Paths made absolute, so that the adapter finds its base from anywhere; names as they are."""
    if name is None or name == NANO or not Path(name).expanduser().is_dir():
        return name
    return str(Path(name).expanduser().resolve())
