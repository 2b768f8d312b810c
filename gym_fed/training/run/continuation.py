"""The checkpoint that a run resumes from: its own newest, or one of another run that the config names."""

from __future__ import annotations

import shutil
from pathlib import Path

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import fsync_folder
from gym_fed.training.run.checkpoints import step_of


def named_checkpoint(config: TrainingConfig, checkpoints: Path) -> Path | None:
    """Return the checkpoint of another run that the config names; None without one, and if this run has its own.

    Args:
        config: The run's config.
        checkpoints: The run's own folder of checkpoints.

    Raises:
        GymError: ``CONFIG_INVALID`` when no run of `gym train` has written it, or when it is not this run's newest;
            ``FILE_NOT_FOUND`` for ``resume_from_checkpoint: true`` without any.
    """
    own = sorted(checkpoints.glob("checkpoint-*"), key=step_of)
    if config.resume_from_checkpoint is True and not own:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"resume_from_checkpoint: true, but there is no checkpoint in {checkpoints}",
            "remove the key: a run goes on by itself where there is one, or name a checkpoint's folder",
        )
    if not isinstance(config.resume_from_checkpoint, str):
        return None
    named = Path(config.resume_from_checkpoint).expanduser()
    if named.resolve().parent == checkpoints.resolve():
        if own and named.resolve() != own[-1].resolve():
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"resume_from_checkpoint: {named.name} is not the newest in {checkpoints}, which is {own[-1].name}",
                f"remove the key, or name another output_dir to begin there from {named.name}",
            )
        return None
    if own:
        return None
    if not (named / "trainer_state.json").is_file() or not (named.parent.parent / "run.json").is_file():
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"resume_from_checkpoint: {named} is no checkpoint of a run of gym train",
            "name OUTPUT_DIR/checkpoints/checkpoint-N; what other programs have trained goes into model or adapter",
        )
    return named


def another_run(named: Path, error: GymError) -> GymError:
    """Return the error for a checkpoint of a run that learned something else; ``error`` names what differs."""
    return GymError(
        ErrorCode.CONFIG_INVALID,
        f"resume_from_checkpoint: {named} cannot be gone on with here: {error.message}",
        "only how often and where it is written may differ; to train on from what it learnt, give model or adapter",
    )


def copy_checkpoint(named: Path, checkpoints: Path) -> Path:
    """Copy a checkpoint of another run into this one, whole or not at all; return the copy."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    # In this folder, because its parent may be on another disk.
    part = checkpoints / f".{named.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(named, part)
    copy = part.rename(checkpoints / named.name)
    fsync_folder(checkpoints)
    return copy
