"""Rows by one name: a path, or a set of the catalogue, of data/dataset_info.json or of the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home
from gym_fed.data.catalogue import catalogue
from gym_fed.data.registry import DatasetRegistry, default_store, is_dataset_name

INFO = Path("data") / "dataset_info.json"
"""Where LLaMA-Factory looks for the descriptions of its sets, from the working directory."""


def named_rows(name: str) -> list[dict[str, Any]]:
    """Every row of ``named_source``. Raises as it and ``source_rows``."""
    from gym_fed.data.sources import source_rows

    return [row for _, row in source_rows(named_source(name))]


def named_source(name: str) -> DataConfig:
    """What a name stands for: the first of a file, folder or URL, the catalogue, data/dataset_info.json, the registry.

    Raises:
        GymError: ``NOT_FOUND`` naming where was looked.
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
    """Whether the catalogue has a set of that name, or with that other name."""
    return any(name == key or name in entry.also for key, entry in catalogue().items())


def registered(name: str) -> Path | None:
    """The newest version of a dataset of the default registry, in a folder; None where it has none of that name."""
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
