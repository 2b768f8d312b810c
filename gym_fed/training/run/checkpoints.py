"""Seal complete checkpoints with the digests of their files, and verify these digests before a run resumes.

The seal is written last. A checkpoint without a seal is incomplete, because the process was killed or the disk was
full, and can be deleted. A checkpoint whose files differ from its seal was damaged later, and is never deleted here.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, fsync_folder, fsync_tree, full_disk_named, write_atomically
from gym_fed.core.text import counted
from gym_fed.training.processes.ranks import is_main
from gym_fed.training.run.reproducibility import RunWarning

SEAL = "seal.json"
_DAMAGED = "damaged-"


def seal(checkpoint: Path) -> None:
    """Write the sizes and SHA-256 digests of all files of a complete checkpoint to its seal.

    The files and their folders are synced to disk first. Older checkpoints are deleted once the seal is written, so
    after a power failure, a seal for lost data would leave nothing to resume from. Hashing one GiB from the page
    cache takes about a second on a CPU with SHA instructions.
    """
    fsync_tree(checkpoint)
    fsync_folder(checkpoint.parent)
    fsync_folder(checkpoint.parent.parent)  # the first checkpoint also creates ``checkpoints``
    files = {
        file.relative_to(checkpoint).as_posix(): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.name != SEAL
    }
    write_atomically(checkpoint / SEAL, f"{json.dumps({'files': files}, indent=2)}\n".encode())


def break_seal(checkpoint: Path) -> None:
    """Delete the seal of a checkpoint before it is overwritten."""
    (checkpoint / SEAL).unlink(missing_ok=True)


def damage(checkpoint: Path) -> str | None:
    """Describe the first changed file of a sealed checkpoint; None if no file has changed."""
    try:
        files = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return f"{SEAL} cannot be read"
    for name, (size, _) in expected.items():  # compare sizes first, since digests are more expensive
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} of its {counted(size, 'byte')}"
    for name, (_, digest) in expected.items():
        try:
            actual = file_sha256(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if actual != digest:
            return f"{name} has a different SHA-256 digest than when it was saved"
    return None


def require_intact(checkpoint: Path) -> None:
    """Refuse a checkpoint specified by the user if it is incomplete or damaged."""
    problem = (
        damage(checkpoint) if (checkpoint / SEAL).exists() else f"it has no {SEAL}: saving was interrupted"
    )
    if problem is not None:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"resume_from_checkpoint: {checkpoint} is damaged: {problem}",
            "restore the file, or choose another checkpoint; without the key, a run resumes from its newest intact one",
        )


def newest_intact(checkpoints: Path) -> Path | None:
    """Return the checkpoint to resume from; None if no checkpoint was ever completed.

    Incomplete checkpoints are deleted. Damaged ones that are newer than the returned one are renamed to
    ``damaged-checkpoint-N``. Both are reported with a ``RunWarning``.

    Raises:
        GymError: ``STATE_CORRUPT`` if all completed checkpoints are damaged; they are not renamed.
    """
    damaged: list[tuple[Path, str]] = []
    for checkpoint in sorted(checkpoints.glob("checkpoint-*"), key=step_of, reverse=True):
        if not (checkpoint / SEAL).exists():
            shutil.rmtree(checkpoint)
            _warn(f"{checkpoint}: deleted, because saving was interrupted")
        elif (problem := damage(checkpoint)) is not None:
            damaged.append((checkpoint, problem))
        else:
            for other, problem in damaged:
                _set_aside(other, problem, checkpoint)
            return checkpoint
    if damaged:
        problems = "; ".join(f"{checkpoint.name}: {problem}" for checkpoint, problem in damaged)
        reason = f"{checkpoints}: no checkpoint is intact: {problems}"
        remedy = "restore the file, or pass --overwrite to delete the run and start from the first step"
        raise GymError(ErrorCode.STATE_CORRUPT, reason, remedy)
    return None


def step_of(checkpoint: Path) -> int:
    """Return the step N of a folder ``checkpoint-N``; -1 for any other name."""
    step = checkpoint.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def _set_aside(checkpoint: Path, problem: str, intact: Path) -> None:
    target = checkpoint.with_name(f"{_DAMAGED}{checkpoint.name}")
    if target.exists():
        shutil.rmtree(target)
    checkpoint.rename(target)
    fsync_folder(checkpoint.parent)
    _warn(
        f"{checkpoint} is damaged: {problem}; it is now {target.name}, and the run resumes from {intact.name}"
    )


def _warn(message: str) -> None:
    warnings.warn(message, RunWarning, stacklevel=3)


_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class SealedCheckpoints(_Trainer):  # type: ignore[misc]
    """A mix-in for trainers that seals each checkpoint after the last callback has written its files.

    A checkpoint whose save failed is deleted, which frees space on a full disk.
    """

    args: Any
    state: Any
    accelerator: Any
    _unsealed: Path | None = None

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        self._unsealed = folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # rotate only after sealing
        try:
            with full_disk_named(folder):
                if is_main():
                    break_seal(folder)
                super()._save_checkpoint(*arguments, **named)
        finally:
            self.args.save_total_limit = limit

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        self._unsealed = None
        try:
            super()._maybe_log_save_evaluate(*arguments, **named)
            if self._unsealed is not None:
                self._complete(self._unsealed)
        except Exception:
            if self._unsealed is not None and is_main():
                shutil.rmtree(self._unsealed, ignore_errors=True)
            raise

    def _complete(self, checkpoint: Path) -> None:
        """Seal the checkpoint, then delete older ones beyond ``save_total_limit``."""
        from transformers.trainer_utils import rotate_checkpoints

        self.accelerator.wait_for_everyone()  # every process writes its own random state
        if not is_main():
            return
        with full_disk_named(checkpoint):
            seal(checkpoint)
        self._unsealed = None
        rotate_checkpoints(
            output_dir=self.args.output_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


def named_checkpoint(config: TrainingConfig, checkpoints: Path) -> Path | None:
    """Return the checkpoint of another run that the config specifies; None without one, or if this run has its own.

    Args:
        config: The run's config.
        checkpoints: The checkpoints folder of this run.

    Raises:
        GymError: ``CONFIG_INVALID`` if `gym train` did not write it, or if it is not the newest of its run;
            ``FILE_NOT_FOUND`` for ``resume_from_checkpoint: true`` if there is no checkpoint.
    """
    own = sorted(checkpoints.glob("checkpoint-*"), key=step_of)
    if config.resume_from_checkpoint is True and not own:
        reason = f"resume_from_checkpoint: true, but there is no checkpoint in {checkpoints}"
        remedy = "remove the key to resume the run in output_dir, if there is one, or set it to a checkpoint's folder"
        raise GymError(ErrorCode.FILE_NOT_FOUND, reason, remedy)
    if not isinstance(config.resume_from_checkpoint, str):
        return None
    named = Path(config.resume_from_checkpoint).expanduser()
    if named.resolve().parent == checkpoints.resolve():
        if own and named.resolve() != own[-1].resolve():
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"resume_from_checkpoint: {named.name} is not the newest in {checkpoints}, which is {own[-1].name}",
                f"remove the key, or choose another output_dir for a run that starts from {named.name}",
            )
        return None
    if own:
        return None
    if not (named / "trainer_state.json").is_file() or not (named.parent.parent / "run.json").is_file():
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"resume_from_checkpoint: {named} is not a checkpoint of a gym train run",
            "use OUTPUT_DIR/checkpoints/checkpoint-N; for results of other programs, use model or adapter",
        )
    return named


def another_run(named: Path, error: GymError) -> GymError:
    """Create the error for a checkpoint from a run with different settings. ``error`` describes the difference."""
    return GymError(
        ErrorCode.CONFIG_INVALID,
        f"resume_from_checkpoint: {named} cannot be resumed in this run: {error.message}",
        "only keys that set where and how often files are written may differ; to continue training its result, set "
        "model or adapter",
    )


def copy_checkpoint(named: Path, checkpoints: Path) -> Path:
    """Copy a checkpoint of another run into this one atomically, and return the copy."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    # Written to this folder first, because its parent may be on another disk.
    part = checkpoints / f".{named.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(named, part)
    copy = part.rename(checkpoints / named.name)
    fsync_folder(checkpoints)
    return copy
