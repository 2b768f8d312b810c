"""A grader that searches the answer with a regular expression; optionally the match must equal the reference.

The package ``regex`` is used because its searches can have a time limit: a pattern such as ``(a+)+b`` takes
exponential time on some texts, and models write arbitrary texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import regex  # type: ignore[import-untyped]
from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample


class RegexConfig(GraderConfig):
    """1 if the pattern matches in the answer and, if ``column`` is given, the match equals the reference; else 0."""

    pattern: str
    """Pattern that is searched for anywhere in the answer. With ``column``, its group ``answer`` is compared, or its
    first group if it has none of that name."""

    column: str | None = None
    """The column with the value that the group must equal, ignoring white space at both ends."""

    occurrence: Literal["first", "last"] = "first"
    """The match that is compared."""

    ignore_case: bool = False
    timeout_seconds: float = Field(default=1.0, gt=0)
    """Time limit of a search; a search that exceeds it counts as not found."""


class Regex(Grader):
    """1 if the pattern is found and, with a column, its group equals the reference; else 0."""

    Settings = RegexConfig
    config: RegexConfig

    def __init__(self, config: RegexConfig) -> None:
        super().__init__(config)
        try:
            self._pattern = regex.compile(config.pattern, regex.IGNORECASE if config.ignore_case else 0)
        except regex.error as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"graders: {self.name}: pattern {config.pattern!r} is not a regular expression: {error}",
                "correct the pattern; in YAML, put it in single quotes",
            ) from error
        if config.column is not None and not self._pattern.groups:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"graders: {self.name}: pattern {config.pattern!r} has no group to compare with {config.column!r}",
                "put the answer's part in parentheses, or remove column",
            )
        self._group = "answer" if "answer" in self._pattern.groupindex else 1

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._is_right(sample)) for sample in samples]

    def _is_right(self, sample: Sample) -> bool:
        column = self.config.column
        reference = None if column is None else str(sample.column(column, self.name)).strip()
        matches = self._pattern.finditer(sample.completion, timeout=self.config.timeout_seconds)
        try:
            hits = list(itertools.islice(matches, 1 if self.config.occurrence == "first" else None))
        except TimeoutError:
            return False
        if not hits or reference is None:
            return bool(hits)
        answer = (hits[-1][self._group] or "").strip()
        return bool(
            answer.casefold() == reference.casefold() if self.config.ignore_case else answer == reference
        )
