"""Class-level ``DatasetRegistry.push`` and ``pull``, with ``license=`` and rows in memory as in other tools."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gym_fed.core.aliases import note
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.pipeline import DataPipeline
from gym_fed.data.registry import DatasetManifest, DatasetRegistry, default_store
from gym_fed.data.sources import INFO, is_catalogued, registered

__all__ = ["is_catalogued", "local_info", "pull", "push"]


def local_info(name: str) -> str | None:
    """Return ``data/dataset_info.json`` if it describes a dataset of that name."""
    from gym_fed.data.dataset_info import read_dataset_info

    return str(INFO) if INFO.is_file() and name in read_dataset_info(INFO) else None


def push(
    name: str, dataset: Any, *, license: str | None = None, licence: str | None = None, description: str = ""
) -> DatasetManifest:
    """Publish a dataset in the default store from a path or from rows in memory.

    Args:
        dataset: A file or folder, or rows, which are written as JSON Lines.
        license: SPDX identifier in upper or lower case; gym-fed's own spelling of the argument is ``licence``.
        licence: See ``license``.
        description: One-line description.

    Raises:
        GymError: ``USAGE`` for any other value, or rows that cannot be written as JSON; see ``DatasetRegistry.push``.
    """
    note("DatasetRegistry.push(..., license=)", f"`DatasetRegistry({default_store()!r}).push(..., licence=)`")
    given = licence or license
    registry = DatasetRegistry(default_store())
    if isinstance(dataset, str | Path):
        return registry.push(name, dataset, licence=given, description=description)
    if not isinstance(dataset, Iterable):
        problem = f"{name}: {type(dataset).__name__} is not a dataset"
        raise GymError(ErrorCode.USAGE, problem, "pass a path or a list of rows")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w", encoding="utf-8") as out:
            for number, row in enumerate(dataset, 1):
                try:
                    out.write(json.dumps(dict(row), ensure_ascii=False, sort_keys=True) + "\n")
                except (TypeError, ValueError) as error:
                    problem = f"{name}: row {number} cannot be written as JSON: {error}"
                    raise GymError(ErrorCode.USAGE, problem, "push a file") from error
        return registry.push(name, file, licence=given, description=description)


def pull(reference: str, dest: str | Path | None = None) -> Any:
    """Return the rows of a dataset in the default store, or write its files to ``dest``.

    Raises:
        GymError: See ``DatasetRegistry.pull``.
    """
    note("DatasetRegistry.pull", f"`DatasetRegistry({default_store()!r}).pull(name, folder)`")
    registry = DatasetRegistry(default_store())
    if dest is not None:
        return registry.pull(reference, dest)
    registry.show(reference)  # raises ``NOT_FOUND`` for a missing dataset
    folder = registered(reference)
    assert folder is not None
    return DataPipeline([str(folder)])
