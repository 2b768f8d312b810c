r"""Mathematical equivalence of an answer with a reference, by the package math-verify (Kydlíček et al. 2025).

It reads LaTeX and plain expressions and compares them with sympy: ``\frac{1}{2}`` equals ``0.5``; sets, intervals,
matrices and equations are understood. Parsing and simplification can take any time, so each comparison runs in the
bounded child process (``gym_fed.core.bounded``).
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted
from gym_fed.evaluation.graders.base import Grader, Sample

MAX_CHARACTERS = 20_000
"""Only the end of a longer answer is read."""
_IMPORT_SECONDS = 60.0
"""Allowance of the hard limit for the import of sympy in a new child process."""


class MathVerifyConfig(GraderConfig):
    """1 if the answer is mathematically equal to the reference, by math-verify, else 0."""

    column: str = "answer"
    timeout_seconds: float = Field(default=5.0, gt=0, le=60)
    """Maximum time of one comparison; an answer that takes longer is wrong, and counted in a warning."""


class MathVerify(Grader):
    """1 if the answer is mathematically equal to the reference, else 0.

    Attributes:
        num_exceeded: Answers whose comparison exceeded a limit since ``setup``.
    """

    Settings = MathVerifyConfig
    config: MathVerifyConfig

    def __init__(self, config: MathVerifyConfig) -> None:
        super().__init__(config)
        require_package("math_verify", "graders[].grader: math_verify", "math")
        self.num_exceeded = 0

    def setup(self) -> None:
        self.num_exceeded = 0

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._is_right(sample)) for sample in samples]

    def teardown(self) -> None:
        if self.num_exceeded:
            warnings.warn(
                f"grader {self.name}: {counted(self.num_exceeded, 'answer')} exceeded the limits of a comparison, and "
                f"were counted as wrong (timeout_seconds: {self.config.timeout_seconds:g})",
                stacklevel=2,
            )

    def _is_right(self, sample: Sample) -> bool:
        reference = str(sample.column(self.config.column, self.name))
        seconds = self.config.timeout_seconds
        texts = {"reference": reference, "answer": sample.completion[-MAX_CHARACTERS:]}
        try:
            verdict = evaluate(is_equal, seconds=seconds + _IMPORT_SECONDS, limit=seconds, **texts)
        except LimitExceededError:
            self.num_exceeded += 1
            return False
        if verdict is None:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {self.name}: {self.config.column!r} contains no mathematics: {reference[:60]!r}",
                "use a number, a letter or an expression in LaTeX, such as $ab$, or grade this data with exact",
            )
        return bool(verdict)


_NOTATION = re.compile(r"[\d\\^_{}=<>+*/|]")
"""A text without any of these is prose, which LaTeX would read as a product of letters."""

_LETTER = re.compile(r"\W*([A-Za-z])\W*")
_LAST_LETTER = re.compile(r"(?<!\w)([A-Za-z])\W*$")


class _AlarmRang(BaseException):
    """Raised by the alarm; not an ``Exception``, which math-verify would catch."""


def is_equal(reference: str, answer: str, limit: float) -> bool | None:
    """Return whether an answer equals a reference; None for a reference without mathematics. Runs in the child process.

    Args:
        reference: A number, a letter or an expression, as LaTeX or plain text.
        answer: The text whose last expression, or boxed one, is compared; without any, its last word if that is a
            letter.
        limit: Time limit in seconds, without the import of sympy.

    Raises:
        LimitExceededError: After ``limit``.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list[Any]:
        values: list[Any] = parse(text, parsing_timeout=None)
        return [value for value in values if not isinstance(value, str)]

    with _alarm(limit):
        expected, values = parsed(reference), parsed(answer)
        if not expected and (letter := _LETTER.fullmatch(reference)):
            expected = parsed(f"${letter[1]}$")
            if not values and (last := _LAST_LETTER.search(answer)):
                values = parsed(f"${last[1]}$")
        elif not expected and _NOTATION.search(reference):
            expected = parsed(f"${reference}$")
        return bool(verify(expected, values, timeout_seconds=None)) if expected else None


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
