"""Comparison of mathematical expressions with math-verify; runs in the bounded child process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.bounded.errors import LimitExceededError


class _AlarmRang(BaseException):
    """Raised by the alarm; not an ``Exception``, which math-verify would catch."""


def is_equal(reference: str, answer: str, seconds: float) -> bool | None:
    """Return whether an answer equals a reference; None for a reference without mathematics.

    Args:
        reference: A number or an expression, as LaTeX or plain text.
        answer: The text whose last expression, or boxed one, is compared.
        seconds: Time limit, without the import of sympy.

    Raises:
        LimitExceededError: After ``seconds``.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        found: list[Any] = parse(text, parsing_timeout=None)
        return [value for value in found if not isinstance(value, str)]

    with _alarm(seconds):
        gold = parsed(reference) or parsed(f"${reference}$")
        return bool(verify(gold, parsed(answer), timeout_seconds=None)) if gold else None


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
