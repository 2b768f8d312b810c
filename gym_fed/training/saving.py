"""Writes the end of a run: a model folder, or a PEFT adapter with the name of its base."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.models import NANO
from gym_fed.training.lora import save_adapter


def save_final(model: Any, tokenizer: Any, config: TrainingConfig, folder: Path) -> None:
    """Save beside the run's other files; a kill half-way leaves the run unfinished, never half a model.

    Args:
        model: The trained model or PEFT model; it is not changed.
        tokenizer: Saved with it.
        config: Gives ``save_dtype`` and the base's name.
        folder: The run folder.
    """
    import torch

    part = folder / ".final.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    if config.finetuning == "lora":
        save_adapter(model, part, _portable_name(config.model))
    else:
        saved = model
        if config.save_dtype is not None and config.save_dtype != config.dtype:
            saved = copy.deepcopy(model).to(getattr(torch, config.save_dtype))
        saved.save_pretrained(str(part))
    tokenizer.save_pretrained(str(part))
    for file in part.iterdir():
        file.replace(folder / file.name)
    part.rmdir()


def _portable_name(name: str | None) -> str | None:
    """Paths made absolute, so that the adapter finds its base from anywhere; names as they are."""
    if name is None or name == NANO or not Path(name).expanduser().is_dir():
        return name
    return str(Path(name).expanduser().resolve())
