"""Comparison of mathematical expressions with math-verify; runs in the bounded child process."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.bounded.errors import LimitExceededError

_NOTATION = re.compile(r"[\d\\^_{}=<>+*/|]")
"""A text without any of these is prose, which LaTeX would read as a product of letters."""

_LETTER = re.compile(r"\W*([A-Za-z])\W*")
_LAST_LETTER = re.compile(r"(?<!\w)([A-Za-z])\W*$")


class _AlarmRang(BaseException):
    """Raised by the alarm; not an ``Exception``, which math-verify would catch."""


def is_equal(reference: str, answer: str, seconds: float) -> bool | None:
    """Return whether an answer equals a reference; None for a reference without mathematics.

    Args:
        reference: A number, a letter or an expression, as LaTeX or plain text.
        answer: The text whose last expression, or boxed one, is compared; without any, its last word if that is a
            letter.
        seconds: Time limit, without the import of sympy.

    Raises:
        LimitExceededError: After ``seconds``.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        found: list[Any] = parse(text, parsing_timeout=None)
        return [value for value in found if not isinstance(value, str)]

    with _alarm(seconds):
        gold, found = parsed(reference), parsed(answer)
        if not gold and (letter := _LETTER.fullmatch(reference)):
            gold = parsed(f"${letter[1]}$")
            if not found and (last := _LAST_LETTER.search(answer)):
                found = parsed(f"${last[1]}$")
        elif not gold and _NOTATION.search(reference):
            gold = parsed(f"${reference}$")
        return bool(verify(gold, found, timeout_seconds=None)) if gold else None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer"):  # Windows: the parent's deadline is the only one
        yield
        return

    def on_alarm(*_: object) -> None:
        raise _AlarmRang

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _AlarmRang:
        raise LimitExceededError("time", seconds) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
