"""Match untrusted regular expressions in a child process, because ``re`` cannot be interrupted."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import EvaluationError, evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

_TEXT_CHARS = 1 << 12
_LONGER = 4
_MAX_GROWTH = 8
"""A text of four times the length takes 4 times as long if a pattern is linear, and 16 times if it is quadratic."""
_SUSPECT_GROWTH = 6
_SUSPECT_SECONDS = 0.0002
"""Maximum CPU time for ``_TEXT_CHARS``. A quadratic pattern below it takes at most 13 s for 1 MB."""
_SLOW_SECONDS = 0.02
"""Maximum CPU time for ``_LONGER * _TEXT_CHARS``; linear patterns of published models take up to 0.016 s."""
_MAX_DIGITS_SECONDS = 0.2
"""Maximum CPU time for ``_TEXT_CHARS`` digits; published patterns that group digits take up to 0.05 s."""
_MAX_WINDOW = 3
_MAX_WINDOWS = 200
_ATOM = re.compile(
    r"\\[pP]\{\^?\w+\}|\\x\{\w+\}|\\u\w{4}|\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|[^()|?*+{}^$]", re.S
)
_ALPHABET = "aZé中क1²٣ \t\n\r\u00a0.,!'\"-_/$+\u0301\u200d\x00"


def search_texts(pattern: str) -> None:
    """Check how long a pattern takes on texts that it partly matches; if the time grows too fast, try longer ones.

    Quadratic time is accepted for runs of digits only: published tokenizers group digits from the right.

    Raises:
        ValueError: If the time grows much faster than the text, if a run of digits takes too long, or if tokenizers
            rejects the pattern or aborts a search.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    search = _without_panics(Split(Regex(pattern), behavior="isolated").pre_tokenize_str)

    def seconds(unit: str, end: str, chars: int) -> float:
        text = unit * (chars // len(unit)) + end
        began = time.thread_time()  # excludes waiting for a CPU on a busy machine
        search(text)
        return time.thread_time() - began

    for unit, end in _probes(pattern):
        shorter, short = (seconds(unit, end, chars) for chars in (_TEXT_CHARS // _LONGER, _TEXT_CHARS))
        if unit.isdigit():
            if short > _MAX_DIGITS_SECONDS:
                raise ValueError(f"takes {short:.1f} s for a run of {_TEXT_CHARS:,} digits")
            continue
        if short < max(_SUSPECT_SECONDS, _SUSPECT_GROWTH * shorter):
            continue
        # Such short times vary, so the growth must be confirmed with longer texts.
        long = seconds(unit, end, _LONGER * _TEXT_CHARS)
        short = max(short, seconds(unit, end, _TEXT_CHARS))
        if long > _MAX_GROWTH * short and (
            long > _SLOW_SECONDS or seconds(unit, end, _LONGER**2 * _TEXT_CHARS) > _MAX_GROWTH * long
        ):
            raise ValueError(f"takes {long / short:.0f} times as long for {_LONGER} times the text")


def _probes(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (unit, ending) pairs for test texts: single characters, and matches of the pattern's parts."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    def sample(atom: str) -> str:
        try:
            split = Split(Regex(atom), behavior="removed", invert=True)
            matched = [piece for piece, _ in split.pre_tokenize_str(_ALPHABET + atom)]
        except Exception:  # noqa: BLE001  # not a valid pattern on its own
            return ""
        return matched[0] if matched else ""

    parts = [part for part in map(cache(sample), _ATOM.findall(pattern)) if part]
    windows = dict.fromkeys(
        "".join(parts[at : at + size]) for size in range(1, _MAX_WINDOW + 1) for at in range(len(parts))
    )
    beginnings = ("".join(parts[: len(parts) - cut]) for cut in range(_MAX_WINDOW + 1))
    units = filter(None, [*_ALPHABET, *list(windows)[:_MAX_WINDOWS], *beginnings])
    for unit in dict.fromkeys(unit[0] if unit == unit[0] * len(unit) else unit for unit in units):
        for end in ("", "\x01", *parts[-1:]):
            yield unit, end


def _without_panics(function: Callable[[str], Any]) -> Callable[[str], Any]:
    """Convert panics of tokenizers into ``ValueError``; it aborts long searches with a ``BaseException``."""

    def call(text: str) -> Any:
        try:
            return function(text)
        except BaseException as error:
            raise ValueError((str(error).splitlines() or ["no reason given"])[0]) from error

    return call


BOUNDED_REGEX = "bounded_regex"
"""Name, in the evaluation harness, of the filter that replaces ``regex`` in untrusted tasks."""


_HALF_SECONDS = 1.0
"""Time limit in seconds for each half in the bisection for the slowest pattern."""


class BoundedPattern:
    """An untrusted regular expression, with the methods of ``re.Pattern`` that evaluations need.

    Args:
        pattern: A regular expression in the syntax of ``re``.
        place: Location of the pattern for error messages: a file and key, or only the key.
    """

    def __init__(self, pattern: str, place: str) -> None:
        self.pattern, self._place = pattern, place

    def findall(self, text: str) -> list[Any]:
        """Return all matches in a text, like ``re.Pattern.findall``.

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
            raise self._error(
                f"{error.need} on a text of {counted(len(arguments['text']), 'character')}"
            ) from error
        except EvaluationError as error:
            raise self._error(f"fails: {error}") from error

    def _error(self, problem: str) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID,
            f"{self._place}: the pattern {plain(self.pattern, 80)!r} {problem}",
            "use narrower repetitions, for example [^<]* instead of .*",
        )


class UnusablePatternError(Exception):
    """A pattern cannot be matched within the limits.

    Attributes:
        pattern: The pattern.
        problem: Verb phrase that completes the error message.
    """

    def __init__(self, pattern: str, problem: str) -> None:
        super().__init__(f"{pattern} {problem}")
        self.pattern, self.problem = pattern, problem


def require_quick_match(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Check, in the child process, that untrusted patterns can be matched against names within the limits.

    The limits apply to all patterns together.

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
        raise UnusablePatternError(patterns[broken[0]], f"is not a regular expression: {broken[1]}")


def _slowest(patterns: Sequence[str], names: Sequence[str]) -> str:
    """Find the slowest pattern by bisection; each half gets a part of the time."""
    while len(patterns) > 1:
        half = patterns[: len(patterns) // 2]
        try:
            evaluate(match_all, seconds=_HALF_SECONDS, patterns=list(half), names=list(names))
            patterns = patterns[len(half) :]
        except LimitExceededError:
            patterns = half
    return patterns[0]


def match_all(patterns: list[str], names: list[str]) -> tuple[int, str] | None:
    """Match each pattern against each name as PEFT does (``match`` and ``fullmatch``), in the child process.

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
