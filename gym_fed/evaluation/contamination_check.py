"""Check training rows for contamination by the evaluation suites on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.core.text import counted
from gym_fed.data.steps import Row, text_of
from gym_fed.evaluation.suite_filter import SuiteFilter, build_filter

_SHOWN = 20


@dataclass(frozen=True)
class ContaminatedRow:
    """A training row that contains a run of words from an evaluation row.

    Attributes:
        place: The place of the training row.
        suite: The suite whose row it contains.
        words: The run that was found.
    """

    place: str
    suite: str
    words: str


@dataclass
class ContaminationReport:
    """The result of a contamination check.

    Attributes:
        suites: The checked suites with the digests of their filters.
        rates: The false positive rate of a run of words, by suite.
        rows: The number of checked rows.
        contaminated: The number of contaminated rows.
        first: The first of them.
    """

    suites: dict[str, str] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    contaminated: int = 0
    first: list[ContaminatedRow] = field(default_factory=list)

    def describe(self) -> str:
        """Summarize in one line."""
        against = ", ".join(self.suites) or "no suite is here"
        return (
            f"{self.contaminated} of {counted(self.rows, 'row')} contain evaluation rows (checked: {against})"
        )


class ContaminationCheck:
    """Checks rows one at a time.

    Args:
        filters: The filters of the suites.

    Attributes:
        report: The report on the rows so far.
    """

    def __init__(self, filters: Sequence[SuiteFilter]) -> None:
        self._filters = list(filters)
        self.report = ContaminationReport(
            {suite_filter.suite: suite_filter.digest for suite_filter in self._filters},
            {suite_filter.suite: suite_filter.rate for suite_filter in self._filters},
        )

    def find(self, place: str, row: Row) -> ContaminatedRow | None:
        """Return the contamination of a row; None for a clean one."""
        self.report.rows += 1
        text = text_of(row)
        for suite_filter in self._filters:
            if (words := suite_filter.found_in(text)) is not None:
                match = ContaminatedRow(place, suite_filter.suite, words)
                self.report.contaminated += 1
                if len(self.report.first) < _SHOWN:
                    self.report.first.append(match)
                return match
        return None


def filters_here(names: Iterable[str] | None = None, data: Path | None = None) -> list[SuiteFilter]:
    """Load the filters of suites whose rows are on this machine, building each once.

    Args:
        names: Suites or tasks; one that is not here is refused. None takes all suites, without those that are not here.
        data: A folder of evaluation sets.

    Raises:
        GymError: As ``tasks_of``.
    """
    from gym_fed.evaluation.suites.listing import listing

    filters = []
    for name in listing().suites if names is None else names:
        try:
            filters.append(_filter_of(name, data))
        except GymError as error:
            if names is not None or error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.MISSING_DEPENDENCY):
                raise
    return filters


@cache
def _filter_of(name: str, data: Path | None) -> SuiteFilter:
    from gym_fed.evaluation.suites.store import evals_home
    from gym_fed.evaluation.suites.tasks import tasks_of

    tasks = tasks_of([name], data, graded=False)
    locks = {task.name: task.lock for task in tasks}
    cached = evals_home() / "filters" / f"{canonical_digest([2, name, locks])[:32]}.json"
    if cached.is_file():
        return SuiteFilter.load(cached)
    rows: list[Any] = [row for task in tasks for row in task.rows[task.split]]
    made = build_filter(name, rows, locks)
    made.save(cached)
    return made
