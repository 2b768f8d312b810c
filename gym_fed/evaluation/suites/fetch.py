"""Fetch the datasets of suites: with consent, verified, converted to JSON Lines and locked.

    offers = offers_for(["core"], home)
    fetch_offers(offers, home)

The first fetch of a set records its commit and the SHA-256 of every file in ``evals.lock``. Later fetches use the same
commit unless an update is requested. No code of a dataset is ever run.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gym_fed.base.downloads import hub
from gym_fed.base.downloads.fetch import Report, fetch, silent
from gym_fed.base.downloads.offer import DownloadOffer, RepoFile, offer_dataset_files
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.evaluation.suites.definitions import members
from gym_fed.evaluation.suites.row_files import SUFFIXES, read_split, rows_bytes
from gym_fed.evaluation.suites.store import (
    LockedDataset,
    LockedFile,
    listing,
    locked_file,
    read_lock,
    split_path,
    unknown_task,
    write_lock,
)


@dataclass(frozen=True)
class WantedSplit:
    """A split of a subset, with the pattern of its files in the repository."""

    subset: str | None
    split: str
    pattern: str


@dataclass(frozen=True)
class DatasetOffer:
    """The missing downloads of one dataset.

    Attributes:
        dataset: The dataset's name in the registry.
        download: The files, their sizes, and the licence stated on the card.
        wanted: The splits to create from them.
    """

    dataset: str
    download: DownloadOffer
    wanted: tuple[WantedSplit, ...]
    licence: str

    def describe(self) -> str:
        """Describe the offer in one line."""
        stated = f"{self.dataset}: {self.download.describe()}"
        return stated if self.download.licence else f"{stated}; its authors: {self.licence}"


def datasets_of(names: Sequence[str]) -> dict[str, list[WantedSplit]]:
    """Return the splits needed by suites, groups, tasks and datasets, by dataset; packaged ones need none.

    Raises:
        GymError: ``USAGE`` for an unknown name.
    """
    known = listing()
    entries: dict[str, None] = {}
    for name in names:
        if name in known.suites or name in known.tasks:
            entries.update(dict.fromkeys(known.entries(name)))
        elif name in known.datasets:
            entries.update(dict.fromkeys(key for key, task in known.tasks.items() if task.dataset == name))
        else:
            raise unknown_task(name, known.datasets)
    by_dataset: dict[str, dict[WantedSplit, None]] = {}
    for entry_name in entries:
        entry = known.tasks[entry_name]
        dataset = known.datasets[str(entry.dataset)]
        if dataset.hub is None:
            continue
        for subset, _ in members(entry_name).values():
            for part in str(subset).split("-") if entry.each == "pair" else [subset]:
                for split, pattern in dataset.splits.items():
                    wanted_split = WantedSplit(part, split, pattern.format(subset=part or ""))
                    by_dataset.setdefault(str(entry.dataset), {})[wanted_split] = None
    return {name: list(splits) for name, splits in by_dataset.items()}


def offers_for(names: Sequence[str], home: Path, *, update: bool = False) -> list[DatasetOffer]:
    """Query the Hub for datasets with missing files; complete ones need no query.

    Args:
        home: The folder of fetched sets.
        update: True to fetch the newest commit of every set.

    Raises:
        GymError: Errors of ``datasets_of`` and ``offer_dataset``; ``HASH_MISMATCH`` if a file here changed, or
            on the Hub within the locked commit; ``UNAVAILABLE`` for a repository with a different file layout.
    """
    lock = read_lock(home)
    offers = []
    for name, splits in datasets_of(names).items():
        locked = lock.datasets.get(name)
        paths = [split_path(name, split.subset, split.split) for split in splits]
        if not update and all(locked_file(home, lock, name, path) is not None for path in paths):
            continue
        entry = listing().datasets[name]
        commit = None if locked is None or update else locked.commit
        store = home / "hub" / str(entry.hub).replace("/", "--")
        with _with_own_hint(name, home):
            download = offer_dataset_files(str(entry.hub), partial(_split_files, name, splits), store, commit)
        if locked is not None and not update:
            _require_same(name, locked, download)
        offers.append(DatasetOffer(name, download, tuple(splits), entry.licence))
    return offers


def fetch_offers(offers: Sequence[DatasetOffer], home: Path, report: Report = silent) -> list[Path]:
    """Fetch accepted offers and write splits and lock; completed sets are kept if a later one fails.

    Returns:
        Paths of the written files.

    Raises:
        GymError: Errors of ``gym_fed.base.downloads.fetch``; ``DATA_INVALID`` for a file without rows.
    """
    written = []
    for offer in offers:
        with _with_own_hint(offer.dataset, home):
            snapshot = fetch(offer.download, report)
        lock = read_lock(home)
        before = lock.datasets.get(offer.dataset)
        same = before is not None and before.commit == offer.download.commit
        files = dict(before.files) if before is not None and same else {}
        by_path = {file.path: file for file in offer.download.files}
        for split in offer.wanted:
            path = split_path(offer.dataset, split.subset, split.split)
            sources = [by_path[file_path] for file_path in sorted(fnmatch.filter(by_path, split.pattern))]
            files[path] = _convert(offer.dataset, split, snapshot, sources, home / "data" / path)
            written.append(home / "data" / path)
        locked = LockedDataset(
            hub=offer.download.name,
            endpoint=hub.endpoint(),
            commit=offer.download.commit,
            licence=offer.download.licence,
            files=files,
        )
        write_lock(home, lock.model_copy(update={"datasets": {**lock.datasets, offer.dataset: locked}}))
    return written


@contextmanager
def _with_own_hint(name: str, home: Path) -> Iterator[None]:
    """Replace the hint for an unreachable Hub, since these files are not in the Hugging Face cache."""
    try:
        yield
    except GymError as error:
        if error.code is not ErrorCode.UNAVAILABLE or "--data" in str(error.hint):
            raise
        raise GymError(
            error.code,
            error.message,
            f"run `gym eval fetch {name}` on a machine with network access, and copy {home} from there; or "
            "pass a folder that has the files with --data; or set HF_ENDPOINT to a mirror",
        ) from error


def _split_files(dataset: str, wanted: Sequence[WantedSplit], listed: Collection[str]) -> Iterator[str]:
    """Select the files of splits among a repository's paths."""
    for split in wanted:
        matches = sorted(path for path in fnmatch.filter(listed, split.pattern) if path.endswith(SUFFIXES))
        if not matches:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"{dataset}: {listing().datasets[dataset].hub} at {hub.endpoint()} has no files that match "
                f"{split.pattern}",
                "its layout has changed, or the mirror is incomplete: pass a folder with --data",
            )
        yield from matches


def _require_same(name: str, locked: LockedDataset, download: DownloadOffer) -> None:
    sources = {path: digest for file in locked.files.values() for path, digest in file.sources.items()}
    for file in download.files:
        if sources.get(file.path, file.digest) != file.digest:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"{name}: {file.path} of {download.name}: {hub.endpoint()} has a different sha256 than evals.lock "
                f"for commit {locked.commit[:12]}",
                "check HF_ENDPOINT; to use its current files: gym eval fetch --update",
            )


def _convert(
    dataset: str, split: WantedSplit, snapshot: Path, sources: Sequence[RepoFile], target: Path
) -> LockedFile:
    """Write a split as JSON Lines."""
    rows = read_split(dataset, split.split, [snapshot / file.path for file in sources])
    if not rows:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{dataset}: {', '.join(file.path for file in sources)}: no rows",
            "try another HF_ENDPOINT, or pass a folder with --data",
        )
    data = rows_bytes(rows)
    make_folder(target.parent)
    write_atomically(target, data)
    return LockedFile(
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
        rows=len(rows),
        sources={file.path: file.digest for file in sources},
    )
