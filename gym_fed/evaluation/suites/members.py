"""Expand an entry of the registry to tasks: a single one, the files of a pattern, or one per name or language pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.suites.definitions import harness_files, read_definition
from gym_fed.evaluation.suites.listing import ASSETS, TaskEntry, listing
from gym_fed.evaluation.suites.own_file import read_task_file
from gym_fed.evaluation.suites.row_files import Row, read_rows
from gym_fed.evaluation.suites.store import split_path


@cache
def members(entry_name: str) -> Mapping[str, tuple[str | None, Mapping[str, Any]]]:
    """Return name, subset and definition of each task of a registry entry, without loading functions.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` where the definitions are the harness's and it is not installed.
    """
    entry = listing().tasks[entry_name]
    if entry.file is not None:
        task = read_task_file(ASSETS / entry.file)
        definition = {**task.definition(), "grade": task.grade}
        if entry.each == "task":
            names = dict.fromkeys(row["task"] for row in _package_rows(entry))
            return {f"{entry.dataset}_{name}": (entry.subset, {**definition, "only": name}) for name in names}
        if entry.each == "pair":
            return {f"{entry_name}_{pair}": (pair, definition) for pair in entry.pairs}
        return {entry_name: (entry.subset, definition)}
    assert entry.harness is not None
    files = harness_files(entry.harness)
    if not files:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{entry_name}: the installed lm-evaluation-harness has no {entry.harness}",
            "install the one that gym-fed is tried with: pip install 'gym-fed[eval]'",
        )
    made: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
    for file in files:
        definition = {**read_definition(file), "grade": entry.grade}
        subset = entry.subset if "subset" in entry.model_fields_set else definition.get("dataset_name")
        made[str(definition["task"])] = (subset, definition)
    return made


def _package_rows(entry: TaskEntry) -> Sequence[Row]:
    folder = str(listing().datasets[str(entry.dataset)].package)
    return read_rows(ASSETS / split_path(folder, entry.subset, "test"))
