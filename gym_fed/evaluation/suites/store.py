"""The store of fetched data sets: JSON Lines by data set, subset and split, and ``evals.lock`` with their digests.

    ~/.gym-fed/evals/data/DATASET/SUBSET/SPLIT.jsonl

A file whose sha256 is not the lock's is refused.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, file_sha256, write_atomically
from gym_fed.core.text import plain

LOCK = "evals.lock"
WHOLE = "all"
"""The folder of a data set without subsets."""
_MAX_LOCK_BYTES = 16 << 20
_SHA256 = r"^[0-9a-f]{64}$"


class LockedFile(StrictModel):
    """A split."""

    sha256: str = Field(pattern=_SHA256)
    bytes: int = Field(ge=0)
    rows: int = Field(ge=0)
    sources: dict[str, str] = Field(max_length=1000)
    """Digests of the repository's source files by path: SHA-256, or git's SHA-1 for small ones."""


class LockedDataset(StrictModel):
    """A repository at a commit."""

    hub: str
    endpoint: str
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    licence: str | None
    """The licence on its card."""

    files: dict[str, LockedFile]
    """Files by path below ``data``."""


class EvalsLock(StrictModel):
    """The lock file."""

    format: int = Field(default=1, ge=1, le=1)
    datasets: dict[str, LockedDataset] = Field(default_factory=dict)


def evals_home() -> Path:
    """Return ``$GYM_HOME/evals``, or ``~/.gym-fed/evals``."""
    return default_home() / "evals"


def split_path(dataset: str, subset: str | None, split: str) -> str:
    """Return the path of a split below ``data``."""
    return f"{dataset}/{subset or WHOLE}/{split}.jsonl"


def read_lock(home: Path) -> EvalsLock:
    """Read the lock of a folder; empty if nothing was fetched.

    Raises:
        GymError: ``STATE_INVALID`` for a file that is no lock.
    """
    file = home / LOCK
    try:
        with file.open("rb") as stream:
            return EvalsLock.model_validate_json(stream.read(_MAX_LOCK_BYTES))
    except FileNotFoundError:
        return EvalsLock()
    except (OSError, ValidationError) as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{file}: is no lock of evaluation sets: {plain(str(error).partition(chr(10))[0], 120)}",
            "move it away, and fetch the sets again",
        ) from error


def write_lock(home: Path, lock: EvalsLock) -> None:
    """Replace the lock atomically."""
    write_atomically(home / LOCK, (lock.model_dump_json(indent=2) + "\n").encode())


def locked_file(home: Path, lock: EvalsLock, dataset: str, path: str) -> Path | None:
    """Return a fetched split after verification; None if it was not fetched.

    Raises:
        GymError: ``HASH_MISMATCH`` for a file that changed since.
    """
    locked = lock.datasets.get(dataset)
    entry = None if locked is None else locked.files.get(path)
    file = home / "data" / path
    if entry is None or not file.is_file():
        return None
    if file_sha256(file) != entry.sha256:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{file}: has another sha256 than {home / LOCK} says",
            f"remove the file, and run: gym eval fetch {dataset}",
        )
    return file
