"""Regular expressions of strangers: searched in the bounded child process, because ``re`` cannot be stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gym_fed.bounded.errors import LimitExceededError
from gym_fed.bounded.pool import EvaluationError, evaluate
from gym_fed.errors import ErrorCode, GymError
from gym_fed.text import plain

BOUNDED_REGEX = "bounded_regex"
"""The evaluation harness's name for the filter that stands for ``regex`` in a stranger's task."""


class BoundedPattern:
    """A regular expression with the searches of ``re.Pattern`` that evaluations need.

    Args:
        pattern: As ``re`` reads it.
        place: What errors call it: a file and key, or the key alone.
    """

    def __init__(self, pattern: str, place: str) -> None:
        self.pattern, self._place = pattern, place

    def findall(self, text: str) -> list[Any]:
        """See ``re.Pattern.findall``.

        Raises:
            GymError: ``DATA_INVALID`` if the search takes too long, or its result is too large.
        """
        groups = self._call(find_all, text=text)
        return [tuple(one) if isinstance(one, list) else one for one in groups]

    def remove(self, text: str) -> str:
        """The text without its matches; raises as ``findall``."""
        found: str = self._call(remove_all, text=text)
        return found

    def _call(self, function: Any, **arguments: Any) -> Any:
        try:
            return evaluate(function, pattern=self.pattern, **arguments)
        except LimitExceededError as error:
            raise self._error(f"{error.need} on a text of {len(arguments['text']):,} characters") from error
        except EvaluationError as error:
            raise self._error(f"fails: {error}") from error

    def _error(self, problem: str) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID,
            f"{self._place}: the pattern {plain(self.pattern, 80)!r} {problem}",
            "write it with fewer repeats, such as [^<]* in the place of .*",
        )


class SlowPatternError(Exception):
    """A pattern takes too long, or too much memory, to match.

    Attributes:
        pattern: The one.
    """

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self.pattern = pattern


def match_names(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Match patterns of a stranger with names, to learn whether it can be done here as well.

    Patterns that ``re`` does not compile are left to their reader, who reports them.

    Raises:
        SlowPatternError: Naming the first that exceeds a bound.
    """
    try:
        evaluate(match_all, patterns=list(patterns), names=list(names))
    except LimitExceededError as error:
        if len(patterns) == 1:
            raise SlowPatternError(patterns[0]) from error
        middle = len(patterns) // 2
        match_names(patterns[:middle], names)
        match_names(patterns[middle:], names)


def match_all(patterns: list[str], names: list[str]) -> None:
    """In the bounded process: compile each pattern and match it with each name."""
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            continue
        for name in names:
            wanted.match(name)


def find_all(pattern: str, text: str) -> list[Any]:
    """In the bounded process: ``re.findall``."""
    return re.findall(pattern, text)


def remove_all(pattern: str, text: str) -> str:
    """In the bounded process: ``re.sub`` with nothing."""
    return re.sub(pattern, "", text)
