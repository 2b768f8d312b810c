"""The folder of a run: config, metrics, checkpoints, result and lock, and the checks before it is resumed.

::

    config.yaml      the resolved config           metrics.jsonl    a line every logging_steps
    run.json         data, rows, processes, date   checkpoints/     checkpoint-N folders
    result.json      written last: the run is finished; next to it is the model or the adapter
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

from gym_fed.config.schema.base import with_schema_defaults
from gym_fed.config.schema.plugins import as_json, plugins_of, require_run_plugins
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml
from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.file_lock import LockHeldError, lock
from gym_fed.core.files import require_no_links, write_atomically
from gym_fed.core.portable import O_NONBLOCK, read_at
from gym_fed.core.text import counted
from gym_fed.data.row_counts import RowCounts
from gym_fed.training.model.adapters import adapter_digests
from gym_fed.training.processes.ranks import world_size
from gym_fed.training.run.checkpoints import (
    another_run,
    copy_checkpoint,
    named_checkpoint,
    newest_intact,
    require_intact,
)
from gym_fed.training.run.reproducibility import RunWarning

LOCK_FILE = ".lock"
_BATCH_KEYS = {"per_device_train_batch_size", "gradient_accumulation_steps"}
"""Keys that ``auto_batch_size`` sets. Only their product is compared, see ``batch_size.known_sizes``."""

_PROCESS_KEYS = {*_BATCH_KEYS, "distributed"}
"""Keys that may change with the number of processes on a resume, if the number of rows per step stays the same."""

_OUTPUT_KEYS = {
    *("output_dir", "logging_steps", "save_steps", "save_total_limit", "save_final", "save_dtype"),
    *("save_strategy", "tracking", "tracker", "resume_from_checkpoint"),
}
"""Keys that determine where and how often files are written, which may change on a resume."""

_NEW_FOLDER = "choose another output_dir, or pass --overwrite to delete it first"


class FolderLock:
    """A lock on a folder, held by one process until ``release`` is called or the process ends.

    Args:
        folder: An existing folder; its file ``.lock`` is locked.

    Raises:
        GymError: ``STATE_LOCKED`` with the process that holds the lock; ``FILE_EXISTS`` if ``.lock`` is a link.
    """

    def __init__(self, folder: Path) -> None:
        require_no_links(folder / LOCK_FILE)  # the file that it leads to would be emptied
        self._file: FileIO | None = (folder / LOCK_FILE).open("a+b", buffering=0)
        try:
            lock(self._file)
        except LockHeldError as error:
            holder = read_at(self._file.fileno(), 20, 0).decode("ascii", errors="replace") or "unknown"
            self.release()
            reason = f"{folder}: another process ({holder}) is using it"
            remedy = "wait for it or stop it, or choose another output_dir"
            raise GymError(ErrorCode.STATE_LOCKED, reason, remedy) from error
        except OSError as error:  # the file system does not support locks
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}); let no other process use it",
                RunWarning,
                stacklevel=2,
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def release(self) -> None:
        """Release the lock. Repeated calls have no effect."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_held(folder: Path) -> bool | None:
    """Return True if a process uses the folder; None if it was never locked, or if locks are not supported."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | O_NONBLOCK)
    except OSError:
        return None
    with FileIO(descriptor) as file:
        try:
            lock(file, shared=True)
        except LockHeldError:
            return True
        except OSError:  # the file system does not support locks
            return None
    return False


class RunFolder:
    """The folder ``config.output_dir`` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.result = path / "result.json"
        self._lock: FolderLock | None = None
        self._verified: Path | None = None

    def check(
        self, config: TrainingConfig, data_digest: str, eval_digest: str | None = None, *, resume: bool
    ) -> None:
        """Raise the errors of ``open`` without writing anything. The config may still change before the first step.

        Args:
            config: The resolved config.
            data_digest: Digest of the rows.
            eval_digest: Digest of the held-out rows; None if there are none.
            resume: True if an unfinished run may be resumed.

        Raises:
            GymError: ``FILE_EXISTS`` for a finished run, a run with a different config or data, unrelated files, or
                links to files elsewhere; ``STATE_CORRUPT`` if the checkpoint named in the config is damaged.
        """
        self.require_unfinished()
        require_no_links(self.path)
        if (named := named_checkpoint(config, self.checkpoints)) is not None:
            try:
                RunFolder(named.parent.parent)._require_same(config, data_digest, eval_digest)
            except GymError as error:
                raise another_run(named, error) from error
        self._require_intact(config, named)
        if (self.path / "run.json").exists():
            if not self._has_begun():
                return
            if not resume:
                raise self._occupied("holds an unfinished run", f"resume it, {_NEW_FOLDER}")
            require_run_plugins(self.path)
            self._require_same(config, data_digest, eval_digest)
        elif other_files := sorted(p.name for p in self.path.glob("*") if p.name != LOCK_FILE):
            reason = f"is not empty ({other_files[0]}) and contains no run"
            raise self._occupied(reason, "choose an empty or new output_dir")

    def open(
        self,
        config: TrainingConfig,
        data_digest: str,
        eval_digest: str | None = None,
        *,
        begun: str | None = None,
        resume: bool,
        counts: tuple[RowCounts | None, RowCounts | None] = (None, None),
    ) -> Path | None:
        """Start or resume the run of ``config``, locked until ``close``. See ``check`` for the other arguments.

        Args:
            begun: Start time, from the method ``begun``.
            counts: Row counts of ``data`` and ``eval_data`` to record.

        Returns:
            The newest intact checkpoint; None if the run starts at its first step.

        Raises:
            GymError: Errors of ``check``; ``STATE_LOCKED`` if another process uses the folder; ``STATE_CORRUPT`` if all
                checkpoints are damaged.
        """
        if not (self.path / "run.json").exists():  # leave no lock in a folder with other files
            self.check(config, data_digest, eval_digest, resume=resume)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path)
        self.check(config, data_digest, eval_digest, resume=resume)
        begun = begun or self.begun()
        if not self._has_begun():
            (self.path / "environment.json").unlink(missing_ok=True)  # it may belong to a different config
        checkpoint = self.last_checkpoint()
        write_atomically(self.path / "config.yaml", dump_yaml(config).encode())
        values: dict[str, Any] = {
            "data_sha256": data_digest,
            "eval_data_sha256": eval_digest,
            "num_processes": world_size(),
            **{k: count.as_dict() for k, count in zip(("rows", "eval_rows"), counts, strict=True) if count},
            "begun": begun,
        }
        if adapters := adapter_digests(config):
            values["adapters_sha256"] = adapters
        if plugins := plugins_of(config):
            values["plugins"] = as_json(plugins)
        write_atomically(self.path / "run.json", f"{json.dumps(values)}\n".encode())
        if (named := named_checkpoint(config, self.checkpoints)) is not None:
            checkpoint = copy_checkpoint(named, self.checkpoints)
        return checkpoint

    def begun(self, config: TrainingConfig | None = None) -> str:
        """Return the local start time, in ISO format, of the unfinished run here or that ``config`` resumes; else now.

        Raises:
            GymError: ``FILE_EXISTS`` for an unfinished run of an older release.
        """
        file = self.path / "run.json"
        if file.exists() and self._has_begun():
            begun = json.loads(file.read_text(encoding="utf-8")).get("begun")
            if begun is None:
                raise self._occupied(
                    "holds an unfinished run of an older release, which this release cannot resume"
                )
            return str(datetime.fromisoformat(begun).isoformat())
        if config is not None and (named := named_checkpoint(config, self.checkpoints)) is not None:
            return RunFolder(named.parent.parent).begun()
        return datetime.now().isoformat(timespec="seconds")

    def close(self) -> None:
        """Release the folder's lock."""
        if self._lock is not None:
            self._lock.release()

    def require_unfinished(self) -> None:
        """Refuse a finished run, before a model is loaded."""
        if self.result.exists():
            raise self._occupied("holds a finished run")

    def is_unfinished(self) -> bool:
        """Return True if the folder contains an unfinished run that can be resumed."""
        return (self.path / "run.json").exists() and self._has_begun() and not self.result.exists()

    def delete(self) -> None:
        """Delete the run (``--overwrite``). Refuse a folder that is not a run's.

        Raises:
            GymError: ``FILE_EXISTS`` if the folder is not that of a run; ``STATE_LOCKED`` if a process is training in
                it.
        """
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if not (self.path / "run.json").exists():
            raise self._occupied("contains no run, so it is not deleted", "choose another output_dir")
        lock = FolderLock(self.path)
        shutil.rmtree(self.path)
        lock.release()

    def last_checkpoint(self) -> Path | None:
        """Return the newest intact checkpoint; see ``newest_intact``."""
        return newest_intact(self.checkpoints)

    def artifacts(self) -> list[Path]:
        """Return the files of the result: the config and the model or adapter."""
        records = {"run.json", "batch_size.json", LOCK_FILE}
        records |= {f"{name}.jsonl" for name in ("metrics", "performance", "artifacts")}
        return sorted(file for file in self.path.iterdir() if file.is_file() and file.name not in records)

    def finish(self, summary: dict[str, Any]) -> None:
        """Mark the run as finished."""
        write_atomically(self.result, f"{json.dumps(summary, indent=2, sort_keys=True)}\n".encode())

    def _occupied(self, reason: str, remedy: str = _NEW_FOLDER) -> GymError:
        return GymError(ErrorCode.FILE_EXISTS, f"{self.path}: {reason}", remedy)

    def _has_begun(self) -> bool:
        """Return True if the run has left a checkpoint (complete or not), metrics, or a batch size."""
        traces = ("checkpoints/checkpoint-*", "*.jsonl", "batch_size.json")
        return any(any(self.path.glob(pattern)) for pattern in traces)

    def _require_intact(self, config: TrainingConfig, named: Path | None) -> None:
        """Verify the checkpoint of this or another run that the config specifies; only once, since it takes seconds."""
        if named is None and isinstance(config.resume_from_checkpoint, str):
            given = Path(config.resume_from_checkpoint).expanduser()
            named = given if given.is_dir() and given.resolve().parent == self.checkpoints.resolve() else None
        if named is not None and named != self._verified:
            require_intact(named)
            self._verified = named

    def _require_same(self, config: TrainingConfig, data_digest: str, eval_digest: str | None) -> None:
        stored = read_run_config(self.path)
        old = with_schema_defaults(stored, config)
        new = config.model_dump(mode="json")
        begun = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        before = begun.get("num_processes", 1)
        free = _OUTPUT_KEYS | (_BATCH_KEYS if config.auto_batch_size is not None else set())
        same_step = _rows_of_a_step(old, before) == _rows_of_a_step(new, world_size())
        same_step = same_step and _has_whole_checkpoints(old) and _has_whole_checkpoints(new)
        if before != world_size() and same_step:
            free = free | _PROCESS_KEYS
        changed = sorted(k for k in {*old, *new} - free if old.get(k) != new.get(k))
        differences = ", ".join(text for k in changed for text in _differences(k, old.get(k), new.get(k)))
        rows = _rows_of_a_step(old, before)
        resume_hint = (
            f"resume with {counted(before, 'process')}, or with {counted(rows, 'row')} per step as before (processes "
            "x per_device_train_batch_size x gradient_accumulation_steps, under ddp, fsdp2 or sequence_parallel); or "
            f"{_NEW_FOLDER}"
        )
        refuse_first(
            (changed, f"with a different config: {differences}"),
            (
                before != world_size() and not same_step,
                f"with {counted(before, 'process')}, but now there are {world_size()}",
                resume_hint,
            ),
            (
                begun.get("adapters_sha256", []) != adapter_digests(config),
                "from different adapters: their files have changed since",
            ),
            (begun["data_sha256"] != data_digest, "on different data"),
            (begun.get("eval_data_sha256") != eval_digest, "with different held-out rows"),
            code=ErrorCode.FILE_EXISTS,
            prefix=f"{self.path} holds an unfinished run ",
            remedy=_NEW_FOLDER,
        )


def _rows_of_a_step(config: dict[str, Any], processes: int) -> int:
    settings = config.get("distributed") or {}
    if settings.get("strategy") == "sequence_parallel":
        processes //= settings.get("sequence_parallel_size") or processes
    rows: int = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] * processes
    return rows


def _has_whole_checkpoints(config: dict[str, Any]) -> bool:
    """Return True if the run's checkpoints can be loaded with any number of processes."""
    strategy = (config.get("distributed") or {}).get("strategy", "ddp")
    return strategy in ("ddp", "fsdp2", "sequence_parallel")


def _differences(key: str, old: Any, new: Any) -> list[str]:
    """Describe the keys that differ, including keys in sections."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(k for k in {*old, *new} if old.get(k) != new.get(k))
        return [text for k in keys for text in _differences(f"{key}.{k}", old.get(k), new.get(k))]
    before, now = ("a section" if isinstance(value, dict) else repr(value) for value in (old, new))
    return [f"{key} was {before} and is now {now}"]
