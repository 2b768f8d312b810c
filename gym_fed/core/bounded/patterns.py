"""Search untrusted regular expressions in a child process, because ``re`` cannot be interrupted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

BOUNDED_REGEX = "bounded_regex"
"""Name under which the evaluation harness knows the filter that replaces ``regex`` in untrusted tasks."""


_HALF_SECONDS = 1.0
"""For half of the patterns, while the slow one among them is looked for."""


class BoundedPattern:
    """An untrusted regular expression, with the methods of ``re.Pattern`` that evaluations need.

    Args:
        pattern: A regular expression in the syntax of ``re``.
        place: Location of the pattern for error messages: a file and key, or only the key.
    """

    def __init__(self, pattern: str, place: str) -> None:
        self.pattern, self._place = pattern, place

    def findall(self, text: str) -> list[Any]:
        """Return all matches in a text, as ``re.Pattern.findall`` does.

        Raises:
            GymError: ``DATA_INVALID`` if the search takes too long, or its result is too large.
        """
        groups = self._call(find_all, text=text)
        return [tuple(group) if isinstance(group, list) else group for group in groups]

    def remove(self, text: str) -> str:
        """Return the text without the matches; raises the same errors as ``findall``."""
        remaining: str = self._call(remove_all, text=text)
        return remaining

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
            "use fewer repetitions, for example [^<]* instead of .*",
        )


class UnusablePatternError(Exception):
    """A pattern cannot be matched within the bounds.

    Attributes:
        pattern: The pattern.
        problem: Verb phrase that completes the error message.
    """

    def __init__(self, pattern: str, problem: str) -> None:
        super().__init__(f"{pattern} {problem}")
        self.pattern, self.problem = pattern, problem


def require_quick_match(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Check in the child process that untrusted patterns can be matched with names within the limits.

    The limits of one evaluation apply to all patterns together.

    Raises:
        UnusablePatternError: For the first pattern that does not compile, or the slowest one if a limit is exceeded.
    """
    try:
        broken = evaluate(match_all, patterns=list(patterns), names=list(names))
    except LimitExceededError as error:
        raise UnusablePatternError(
            _slowest(patterns, names), "takes too long to compare with the model's names"
        ) from error
    if broken is not None:
        raise UnusablePatternError(patterns[broken[0]], f"is no regular expression: {broken[1]}")


def _slowest(patterns: Sequence[str], names: Sequence[str]) -> str:
    """Find the slowest pattern by bisection; each half gets a fraction of the time."""
    while len(patterns) > 1:
        half = patterns[: len(patterns) // 2]
        try:
            evaluate(match_all, seconds=_HALF_SECONDS, patterns=list(half), names=list(names))
            patterns = patterns[len(half) :]
        except LimitExceededError:
            patterns = half
    return patterns[0]


def match_all(patterns: list[str], names: list[str]) -> tuple[int, str] | None:
    """Match each pattern against each name with both of PEFT's calls, in the child process.

    Returns:
        Index and error of the first pattern that does not compile; None if all compile.
    """
    for index, pattern in enumerate(patterns):
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return index, str(error)
        for name in names:
            compiled.match(name)
            compiled.fullmatch(name)
    return None


def find_all(pattern: str, text: str) -> list[Any]:
    """Call ``re.findall`` in the child process."""
    return re.findall(pattern, text)


def remove_all(pattern: str, text: str) -> str:
    """Remove all matches from a text, in the child process."""
    return re.sub(pattern, "", text)
