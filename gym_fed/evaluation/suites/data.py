"""Find the rows of a task: in the package, in a given folder, or among fetched ones. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.layouts import READERS, as_harness, folders
from gym_fed.evaluation.suites.listing import ASSETS, EvalDataset
from gym_fed.evaluation.suites.row_files import Row, read_rows
from gym_fed.evaluation.suites.store import EvalsLock, locked_file, split_path


@dataclass(frozen=True)
class TaskRows:
    """Rows by split, with their origin.

    Attributes:
        splits: Rows by split, as the definition names it.
        source: A description of the origin: a file, or a repository and its commit.
        partial: The differences to the whole set; empty if there are none.
    """

    splits: Mapping[str, list[Row]]
    source: str
    partial: str = ""


@dataclass(frozen=True)
class Places:
    """The places that are searched for rows.

    Attributes:
        data: A folder that was given, or None.
        home: The folder of fetched sets.
        lock: The lock of ``home``.
    """

    data: Path | None
    home: Path
    lock: EvalsLock

    def rows(
        self, dataset: str, entry: EvalDataset, subset: str | None, splits: Iterable[str]
    ) -> TaskRows | None:
        """Return the rows of a subset, first from the given folder; None if there are none.

        Raises:
            GymError: ``DATA_INVALID`` for files that cannot be read, ``HASH_MISMATCH`` for a fetched one that changed.
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
            ErrorCode.FILE_NOT_FOUND, f"--data {data}: no folder", "give a folder of evaluation sets"
        )


def _given(
    data: Path, dataset: str, entry: EvalDataset, subset: str | None, splits: list[str]
) -> TaskRows | None:
    """Read rows from a folder in the layout of ``gym eval fetch``, of the Hub or of the authors."""
    own = {split: data / split_path(dataset, subset, split) for split in splits}
    if all(file.is_file() for file in own.values()):
        return TaskRows({split: read_rows(file) for split, file in own.items()}, str(data / dataset))
    for folder in folders(data, dataset):
        if not folder.is_dir():
            continue
        files = {split: hub_files(folder, entry.splits[split], subset) for split in splits}
        if all(files.values()):
            rows = {split: row_files_of(dataset, split, found_rows) for split, found_rows in files.items()}
            return TaskRows(rows, str(folder))
        reader = READERS.get(dataset)
        found_rows = None if reader is None else reader(folder, subset or "")
        if found_rows is not None:
            return TaskRows(found_rows.splits, ", ".join(map(str, found_rows.files)), found_rows.partial)
    return None


def hub_files(folder: Path, pattern: str, subset: str | None) -> list[Path]:
    """Return the files of a split in a copy of the Hub's repository."""
    return sorted(folder.glob(pattern.format(subset=subset or "")))


def row_files_of(dataset: str, split: str, files: list[Path]) -> list[Row]:
    """Read the rows of a split's files in order, in the form that definitions need."""
    return as_harness(dataset, split, [row for file in files for row in read_rows(file)])
