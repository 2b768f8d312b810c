"""Open sources of rows: files, generated tasks, the catalogue, the Hub, and LLaMA-Factory's dataset_info.json."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gym_fed.config.train.catalogue import CatalogueEntry, catalogue, catalogue_entry
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home
from gym_fed.data.formats.base import BadRow, Raw, as_object
from gym_fed.data.hub import hub_rows
from gym_fed.data.reading import Learned, PlacedRow, converted, iter_rows, renaming
from gym_fed.data.registry import DatasetRegistry, default_store, is_dataset_name
from gym_fed.data.rows import Row


def source_rows(source: DataConfig) -> Iterator[PlacedRow]:
    """Yield the rows of ``source`` lazily with their places; the caller applies weight and role.

    Raises:
        GymError: See ``load_rows``, ``hub_rows``, ``catalogue_rows``, ``dataset_rows`` and ``generate``.
    """
    return islice(_rows(source), source.num_examples)


class SourceRows:
    """The rows of a source, which every iteration reads again; none are kept in memory."""

    def __init__(self, source: DataConfig) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in source_rows(self._source))


def _rows(source: DataConfig) -> Iterator[PlacedRow]:
    rename = renaming(source.columns)
    learned = Learned(source.roles_to_train, source.train_on_eos)
    if source.path is not None:
        yield from iter_rows(source.path, source.format, rename=rename, learned=learned)
    elif source.hub is not None:
        raw = hub_rows(source.hub, subset=source.subset, split=source.split)
        yield from converted(raw, source.format, rename, learned=learned)
    elif source.name is not None:
        yield from catalogue_rows(source.name, split=source.split)
    elif source.dataset is not None and source.dataset_info is not None:
        from gym_fed.data.dataset_info import dataset_rows

        yield from dataset_rows(source.dataset, source.dataset_info, seed=source.seed)
    else:
        from gym_fed.data.generated import generate_mix

        tasks, count = source.tasks or [], source.num_examples or 0
        rows = generate_mix(tasks, count, seed=source.seed, max_turns=source.max_turns)
        yield from ((f"tasks {', '.join(tasks)}: row {number}", row) for number, row in enumerate(rows, 1))


INFO = Path("data") / "dataset_info.json"
"""Path of LLaMA-Factory's list of datasets, relative to the working directory."""


def named_source(name: str) -> DataConfig:
    """Resolve a name: try a file, folder or URL, then data/dataset_info.json, the catalogue and the registry.

    Raises:
        GymError: ``NOT_FOUND``, listing the places searched.
    """
    if "://" in name or any(mark in name for mark in "*?[") or Path(name).expanduser().exists():
        return DataConfig(path=name)
    if INFO.is_file():
        from gym_fed.data.dataset_info import read_dataset_info

        if name in read_dataset_info(INFO):
            return DataConfig(dataset=name, dataset_info=INFO)
    if is_catalogued(name):
        return DataConfig(name=name)
    if (folder := registered(name)) is not None:
        return DataConfig(path=str(folder))
    raise GymError(
        ErrorCode.NOT_FOUND,
        f"no data called {name!r}",
        f"looked for a file, in {INFO}, in the catalogue (gym data catalogue) and in the registry {default_store()}",
    )


def is_catalogued(name: str) -> bool:
    """Return True if the catalogue has a dataset with this name or alias."""
    return any(name == key or name in entry.also for key, entry in catalogue().items())


def registered(name: str) -> Path | None:
    """Pull a dataset (its newest version unless ``@N`` is given) from the default registry; None if it has none."""
    if not is_dataset_name(name):
        return None
    registry = DatasetRegistry(default_store())
    versions = registry.versions(name.partition("@")[0])
    if not versions:
        return None
    version = int(name.partition("@")[2] or versions[-1])
    folder = default_home() / "pulled" / "datasets" / name.partition("@")[0] / str(version)
    registry.pull(f"{name.partition('@')[0]}@{version}", folder)
    return folder


_MAY_LACK = ("input", "system", "tools", "images", "audios", "videos")


def catalogue_rows(name: str, *, split: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a dataset in the catalogue.

    Args:
        name: Name of the dataset in the catalogue.
        split: Name of the split to read instead of the entry's.

    Raises:
        GymError: ``NOT_FOUND``; ``USAGE`` for a dataset that is not on the Hub, does not contain its images, or has no
            default split; errors of ``hub_rows``.
    """
    entry = catalogue_entry(name)
    if entry.hub is None:
        raise GymError(
            ErrorCode.USAGE,
            f"dataset {name!r} is in LLaMA-Factory's repository, not on the Hub",
            "clone github.com/hiyouga/LLaMA-Factory and use "
            f"data: [{{dataset: {name}, dataset_info: LLaMA-Factory/data}}]",
        )
    if entry.pictures is not None:
        raise GymError(
            ErrorCode.USAGE,
            f"dataset {name!r} refers to images that are not part of it: {entry.pictures}",
            f"put them next to the dataset's file (hf download --repo-type dataset {entry.hub}) and set path to it",
        )
    chosen_split = split or entry.split
    if chosen_split is None:
        raise GymError(ErrorCode.USAGE, f"dataset {name!r} has no default split", "set split")
    subsets: list[str | None] = [*entry.subsets] or [entry.subset]
    for subset in subsets:
        raw = hub_rows(entry.hub, subset=subset, split=chosen_split, folder=entry.folder, files=entry.files)
        yield from rows_of_entry(entry, raw)


def rows_of_entry(entry: CatalogueEntry, raw: Iterator[tuple[str, Any]]) -> Iterator[PlacedRow]:
    """Convert raw rows with the columns of ``entry`` to rows of ``gym_fed.data.rows``."""
    columns = entry.read_columns

    def rename(value: Any) -> Raw:
        row = as_object(value)
        missing = [theirs for ours, theirs in columns.items() if theirs not in row and ours not in _MAY_LACK]
        if missing:
            raise BadRow(
                f"has no column {missing[0]!r}",
                "the dataset has changed; specify its columns in an entry with hub",
            )
        renamed = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
        if entry.speakers and isinstance(turns := renamed.get("conversations"), list):
            renamed["conversations"] = [_spoken(turn, entry.speakers) for turn in turns]
        return renamed

    return converted(raw, entry.format, rename)


def _spoken(turn: Any, speakers: dict[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    speaker = turn.get("from")
    return {**turn, "from": speakers.get(str(speaker), speaker)}
