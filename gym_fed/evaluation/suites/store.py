"""The registry of suites and datasets, and the store of fetched ones with their digests in ``evals.lock``.

    ~/.gym-fed/evals/data/DATASET/SUBSET/SPLIT.jsonl

A file whose sha256 differs from the lock is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, file_sha256, write_atomically
from gym_fed.core.text import plain
from gym_fed.evaluation.suites.row_files import READERS, TaskRows, folders, read_rows, read_split

ASSETS = Path(__file__).parents[2] / "assets" / "suites"


class Suite(StrictModel):
    """Tasks that are run together."""

    about: str
    """Description of what the suite measures."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks and groups."""


class MetricNeeds(StrictModel):
    """Requirements of a task's metric beyond the extra ``eval``; without them the metric would download data itself."""

    packages: list[str] = Field(default_factory=list)
    """Names of packages to import."""

    nltk: str | None = None
    """A resource of NLTK's data, as ``nltk.data.find`` names it."""


class TaskEntry(StrictModel):
    """A task, a group of tasks that match a pattern, or a group that lists its tasks."""

    about: str
    """Description of what the task measures."""

    harness: str | None = None
    """The definition's path below ``lm_eval/tasks``; for a group, a pattern that matches its tasks' files."""

    file: str | None = None
    """The definition's file among gym-fed's assets."""

    tasks: list[str] = Field(default_factory=list)
    """Members, if the entry is a group."""

    dataset: str | None = None
    """Name of the dataset in ``datasets``."""

    subset: str | None = None
    """The subset of the dataset; by default the definition's ``dataset_name``."""

    grade: Literal["humaneval", "mbpp"] | None = None
    """The built-in metric that replaces the harness's."""

    each: Literal["task", "pair"] | None = None
    """``task``: one task for each value of the rows' column ``task``; ``pair``: one for each of ``pairs``."""

    pairs: list[str] = Field(default_factory=list)
    """Language pairs, each written ``from-to``."""

    rows: int | None = None
    """Number of evaluated rows; None for all rows of the dataset."""

    needs: MetricNeeds = MetricNeeds()
    """Requirements of the metric; the task is refused if they are missing."""

    @model_validator(mode="after")
    def _one_origin(self) -> TaskEntry:
        if sum((self.harness is not None, self.file is not None, bool(self.tasks))) != 1:
            raise ValueError("set one of harness, file and tasks")
        if (self.dataset is None) != bool(self.tasks):
            raise ValueError("a task needs a dataset, but a group must not have one")
        return self


class EvalDataset(StrictModel):
    """A dataset and its source."""

    licence: str
    """SPDX identifier of the licence, as stated by the authors."""

    rows: int
    """Number of evaluated rows in all subsets."""

    hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """Name of the repository on the Hugging Face Hub."""

    splits: dict[str, str] = Field(default_factory=dict)
    """Patterns of the repository's files, by split."""

    package: str | None = None
    """The folder among gym-fed's assets, instead of ``hub``."""


class SuiteRegistry(StrictModel):
    """The contents of ``registry.yaml``."""

    suites: dict[str, Suite]
    """Suites by name."""

    tasks: dict[str, TaskEntry]
    """Tasks by name; a suite and a task never share a name."""

    datasets: dict[str, EvalDataset]
    """Datasets by name."""

    @model_validator(mode="after")
    def _names_exist(self) -> SuiteRegistry:
        named = [
            name
            for entries in (self.suites, self.tasks)
            for entry in entries.values()
            for name in entry.tasks
        ]
        if unknown := [name for name in named if name not in self.tasks]:
            raise ValueError(f"no task has the name {unknown[0]!r}")
        datasets = [task.dataset for task in self.tasks.values() if task.dataset is not None]
        if unknown := [name for name in datasets if name not in self.datasets]:
            raise ValueError(f"no dataset has the name {unknown[0]!r}")
        if shared := sorted(self.suites.keys() & self.tasks.keys()):
            raise ValueError(f"{shared[0]!r} is the name of both a suite and a task")
        return self

    def entries(self, name: str) -> Iterator[str]:
        """Return the tasks and pattern groups of a suite, group or task."""
        members = self.suites[name].tasks if name in self.suites else self.tasks[name].tasks
        if not members:
            yield name
        for member in members:
            yield from self.entries(member)


@cache
def listing() -> SuiteRegistry:
    """Load the registry; the result is cached."""
    return load_config(ASSETS / "registry.yaml", SuiteRegistry)


def unknown_task(name: str, also: Iterable[str] = ()) -> GymError:
    """Create the error for an unknown name, with similar names."""
    registry = listing()
    names = list(dict.fromkeys((*registry.suites, *registry.tasks, *also)))
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else f"suites: {', '.join(registry.suites)}; "
    return GymError(
        ErrorCode.USAGE,
        f"no suite or task has the name {name!r}",
        f"{hint}`gym eval list` prints all of them",
    )


LOCK = "evals.lock"
WHOLE = "all"
"""The folder of a dataset without subsets."""
_MAX_LOCK_BYTES = 16 << 20
_SHA256 = r"^[0-9a-f]{64}$"


class LockedFile(StrictModel):
    """A locked file with the rows of a split."""

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
    """Licence stated on the card; None if there is none."""

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
        GymError: ``DATA_INVALID`` for a file that is not a lock.
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
            f"{file} is not a lock file of evaluation sets: {plain(str(error).partition(chr(10))[0], 120)}",
            "move it away, and fetch the sets again",
        ) from error


def write_lock(home: Path, lock: EvalsLock) -> None:
    """Replace the lock atomically."""
    write_atomically(home / LOCK, (lock.model_dump_json(indent=2) + "\n").encode())


def locked_file(home: Path, lock: EvalsLock, dataset: str, path: str) -> Path | None:
    """Verify and return a fetched split; None if it was not fetched.

    Raises:
        GymError: ``HASH_MISMATCH`` for a file that changed after the fetch.
    """
    locked = lock.datasets.get(dataset)
    entry = None if locked is None else locked.files.get(path)
    file = home / "data" / path
    if entry is None or not file.is_file():
        return None
    if file_sha256(file) != entry.sha256:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{file}: its sha256 differs from the one in {home / LOCK}",
            f"remove the file, and run: gym eval fetch {dataset}",
        )
    return file


@dataclass(frozen=True)
class Places:
    """The places that are searched for rows.

    Attributes:
        data: The user's folder of evaluation sets, or None.
        home: The folder of fetched sets.
        lock: The lock of ``home``.
    """

    data: Path | None
    home: Path
    lock: EvalsLock

    def rows(
        self, dataset: str, entry: EvalDataset, subset: str | None, splits: Iterable[str]
    ) -> TaskRows | None:
        """Return the rows of a subset, preferably from the user's folder; None if there are none.

        Raises:
            GymError: ``DATA_INVALID`` for files that cannot be read, ``HASH_MISMATCH`` for a fetched file that changed.
        """
        names = list(dict.fromkeys(splits))
        if entry.package is not None:
            rows = {split: read_rows(ASSETS / split_path(entry.package, subset, split)) for split in names}
            return TaskRows(rows, f"gym-fed, {entry.licence}")
        if self.data is not None and (given := _given(self.data, dataset, entry, subset, names)) is not None:
            return given
        files = {
            split: locked_file(self.home, self.lock, dataset, split_path(dataset, subset, split))
            for split in names
        }
        read = {split: read_rows(file) for split, file in files.items() if file is not None}
        if len(read) < len(names):
            return None
        locked = self.lock.datasets[dataset]
        return TaskRows(read, f"{locked.hub} at commit {locked.commit[:12]}")


def require_folder(data: Path) -> None:
    """Refuse a folder that does not exist.

    Raises:
        GymError: ``FILE_NOT_FOUND``.
    """
    if not data.is_dir():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"--data {data}: not a folder", "use a folder of evaluation sets"
        )


def _given(
    data: Path, dataset: str, entry: EvalDataset, subset: str | None, splits: list[str]
) -> TaskRows | None:
    """Read rows from a folder in the layout of ``gym eval fetch``, the Hub or the authors."""
    own = {split: data / split_path(dataset, subset, split) for split in splits}
    if all(file.is_file() for file in own.values()):
        return TaskRows({split: read_rows(file) for split, file in own.items()}, str(data / dataset))
    for folder in folders(data, dataset):
        if not folder.is_dir():
            continue
        patterns = {split: entry.splits[split].format(subset=subset or "") for split in splits}
        files = {split: sorted(folder.glob(pattern)) for split, pattern in patterns.items()}
        if all(files.values()):
            rows = {split: read_split(dataset, split, paths) for split, paths in files.items()}
            return TaskRows(rows, str(folder))
        reader = READERS.get(dataset)
        if reader is not None and (task_rows := reader(folder, subset or "")) is not None:
            return task_rows
    return None
