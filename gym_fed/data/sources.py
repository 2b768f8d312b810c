"""Open a source of rows: files, generated tasks, the catalogue, the Hub, or LLaMA-Factory's dataset_info.json."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gym_fed.config.train.catalogue import catalogue
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home
from gym_fed.data.columns import renaming
from gym_fed.data.reading import PlacedRow, converted, iter_rows
from gym_fed.data.registry import DatasetRegistry, default_store, is_dataset_name


def source_rows(source: DataConfig) -> Iterator[PlacedRow]:
    """Yield the rows of ``source`` with their places, lazily; the caller applies weight and role.

    Raises:
        GymError: See ``load_rows``, ``hub_rows``, ``catalogue_rows``, ``dataset_rows`` and ``generate``.
    """
    return islice(_rows(source), source.num_examples)


def _rows(source: DataConfig) -> Iterator[PlacedRow]:
    rename = renaming(source.columns)
    if source.path is not None:
        yield from iter_rows(source.path, source.format, rename=rename)
    elif source.hub is not None:
        from gym_fed.data.hub import hub_rows

        raw = hub_rows(source.hub, subset=source.subset, split=source.split)
        yield from converted(raw, source.format, rename)
    elif source.name is not None:
        from gym_fed.data.catalogue_rows import catalogue_rows

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
"""LLaMA-Factory's list of datasets, relative to the working directory."""


def named_rows(name: str) -> list[dict[str, Any]]:
    """Load all rows of ``named_source(name)``; raises what it and ``source_rows`` raise."""
    return [row for _, row in source_rows(named_source(name))]


def named_source(name: str) -> DataConfig:
    """Resolve a name: a file, folder or URL, then data/dataset_info.json, the catalogue and the registry.

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
    """True if the catalogue has a dataset of that name or alias."""
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
