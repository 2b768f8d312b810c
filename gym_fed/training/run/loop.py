"""Runs a built trainer to its last step: start, resume, and rollback after a spike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.core.files import full_disk_named
from gym_fed.training.processes import group as processes
from gym_fed.training.run.early_stopping import EarlyStop
from gym_fed.training.run.folder import RunFolder
from gym_fed.training.run.hooks import RunHooks
from gym_fed.training.run.spikes import Rollbacks


def run_to_end(
    trainer: Any,
    checkpoint: Path | None,
    hooks: RunHooks,
    folder: RunFolder,
    rollbacks: Rollbacks | None,
    early_stop: EarlyStop | None,
) -> None:
    """Train from ``checkpoint`` (or the first step) until the run ends, is stopped, or spikes too often.

    Raises:
        Diverged: When the loss does, or spikes too often.
        GymError: ``DISK_FULL`` when a checkpoint, figures or weights cannot be written; see the callbacks for others.
    """
    if rollbacks is not None:
        trainer.wrap_dataloader = rollbacks.wrap
    while True:
        with full_disk_named(folder.path):
            if checkpoint is None:
                trainer.train()
            elif not _is_at_end(checkpoint, trainer, hooks, early_stop):
                trainer.train(resume_from_checkpoint=str(checkpoint))
        if hooks.spike is None or rollbacks is None:
            return
        checkpoint = _go_back(trainer, hooks, folder, rollbacks)


def _go_back(trainer: Any, hooks: RunHooks, folder: RunFolder, rollbacks: Rollbacks) -> Path:
    assert hooks.spike is not None
    last = processes.on_main(lambda: _text(folder.last_checkpoint()))
    to_step = None if last is None else int(last.rpartition("-")[2])
    rollbacks.add(hooks.spike, to_step, trainer)
    assert last is not None  # add refuses this
    return Path(last)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _is_at_end(checkpoint: Path, trainer: Any, hooks: RunHooks, early_stop: EarlyStop | None) -> bool:
    """Return True, with its weights loaded, if a checkpoint holds the last step: transformers would do one more."""
    from transformers.trainer_callback import TrainerState

    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < state.max_steps and not (early_stop and early_stop.is_over(state)):
        return False
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    hooks.on_train_begin(trainer.args, state, trainer.control)
    return True
