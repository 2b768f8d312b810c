"""The contributor's training data: a file, or a small built-in example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.config.hub.sections import evaluation_names
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest

if TYPE_CHECKING:
    from gym_fed.data.arrow_rows import SelectedRows

ContaminatedRows = Literal["drop", "keep", "refuse"]

EXAMPLE = "example"
EXAMPLE_NAME = "the built-in example"
_EXAMPLE_TASKS = ["copy", "reverse", "upper"]
_EXAMPLE_ROWS = 600


@dataclass(frozen=True)
class Data:
    """Training rows and where they come from."""

    rows: Sequence[dict[str, Any]]
    description: str
    digest: str
    contamination: str = ""
    """A summary of the contaminated rows and what was done with them; empty if there are none."""


_cache: dict[tuple[str, str, str, str, int, int], Data] = {}


def load_data(
    path: str | None,
    format: str = "auto",
    columns: str | None = None,
    contaminated_rows: ContaminatedRows = "drop",
) -> Data:
    """Load the rows of a file, or the built-in example for None or ``example``. A file is read only once per process.

    Args:
        path: Path of the file.
        format: A name in ``gym_fed.core.registries.FORMATS``, or ``auto``.
        columns: Mapping of the file's columns; see ``parse_columns``.
        contaminated_rows: What to do with rows that contain evaluation rows; see ``Policy``.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` with the row; ``POLICY_REFUSED`` if rows contain evaluation rows
            and the policy refuses them, or if no other rows are left; ``USAGE`` for invalid columns.
    """
    if path in (None, EXAMPLE):
        if columns:
            raise GymError(
                ErrorCode.USAGE, "--columns does not apply to the built-in example", "pass --data FILE"
            )
        return _example()
    file = Path(str(path)).expanduser()
    stamp = file.stat() if file.is_file() else None
    key = (
        str(file),
        format,
        columns or "",
        contaminated_rows,
        stamp.st_mtime_ns if stamp else 0,
        stamp.st_size if stamp else 0,
    )
    if key not in _cache:
        from gym_fed.core.files import file_sha256
        from gym_fed.core.registries import FORMATS
        from gym_fed.data.arrow_rows import SelectedRows
        from gym_fed.data.reading import parse_columns
        from gym_fed.data.source_store import stored_rows

        if format != "auto":
            FORMATS.type_of(format)
        source = DataConfig(path=file, format=format, columns=parse_columns(columns))
        rows = SelectedRows.whole(stored_rows(source))
        _cache.clear()
        clean_rows, contamination = _judged(rows, contaminated_rows, str(file))
        _cache[key] = Data(clean_rows, str(file), file_sha256(file), contamination)
    return _cache[key]


def _judged(rows: SelectedRows, contaminated_rows: ContaminatedRows, name: str) -> tuple[SelectedRows, str]:
    """Return the rows to train on and a summary of the contaminated ones."""
    from gym_fed.data.rows import place_of
    from gym_fed.evaluation.contamination_check import ContaminationCheck, filters_here

    check = ContaminationCheck(filters_here())
    clean = [i for i, row in enumerate(rows) if check.find(place_of(row, i + 1), row) is None]
    if len(clean) == len(rows):
        return rows, ""
    first = check.report.first[0]
    summary = f"{check.report.describe()}; the first is {first.place}, with a row of {first.suite}"
    if contaminated_rows == "refuse" or (contaminated_rows == "drop" and not clean):
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"{name}: {summary}",
            "remove them (`gym data show FILE` lists them), or set contaminated_rows in policy.yaml",
        )
    return (
        (rows.take(clean), f"{summary}; dropped")
        if contaminated_rows == "drop"
        else (rows, f"{summary}; kept")
    )


def _example() -> Data:
    from gym_fed.data.generated import generate_mix

    rows = generate_mix(_EXAMPLE_TASKS, _EXAMPLE_ROWS)
    return Data(rows, EXAMPLE_NAME, EXAMPLE)


def evaluation_notes(evaluated_on: Mapping[str, str], require_time: Callable[[], None]) -> Iterator[str]:
    """Yield a line for each evaluation suite of a task that the data cannot be checked against.

    Args:
        evaluated_on: The task's evaluation suites. Only the names of gym-fed's own suites and tasks are looked up.
        require_time: Called before each suite, since reading one takes seconds; raises once the time limit is reached.
    """
    for suite, digest in evaluated_on.items():
        require_time()
        if note := _note(suite, digest):
            yield note


def _note(suite: str, digest: str) -> str:
    from gym_fed.evaluation.contamination_check import filters_here
    from gym_fed.evaluation.suites.tasks import tasks_of

    names, beginnings = evaluation_names()
    begin = f"the hub evaluates on {suite}"
    if suite not in names and (not suite.startswith(beginnings) or "." in suite):
        return f"{begin}, whose rows are private: yours cannot be checked against them"
    try:
        tasks = tasks_of([suite])
        checked = {task for row_filter in filters_here() for task in row_filter.locks}
    except GymError as error:
        if error.code is ErrorCode.UNAVAILABLE:
            return f"{begin}, which is missing here: your rows are not checked against it (gym eval fetch {suite})"
        return f"{begin}: your rows are not checked against it: {error.message}"
    if missing := [task.name for task in tasks if task.name not in checked]:
        return f"{begin}: your rows are not checked against {missing[0]}, whose suite is only partly on this machine"
    if canonical_digest({task.name: task.lock for task in tasks}) != digest:
        return f"{begin}, but its rows differ from the local copy that yours were checked against"
    return ""
