r"""Mathematical equivalence of an answer with a reference, by the package math-verify (Kydlíček et al. 2025).

It reads LaTeX and plain expressions and compares them with sympy: ``\frac{1}{2}`` equals ``0.5``; sets, intervals,
matrices and equations are understood. Parsing and simplification can take any time, so each comparison runs in the
bounded child process (``gym_fed.core.bounded``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.bounded.errors import LimitExceededError
from gym_fed.core.bounded.pool import evaluate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.requirements import require_package
from gym_fed.core.text import counted
from gym_fed.evaluation.graders._math_child import is_equal
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
                f"grader {self.name}: {counted(self.num_exceeded, 'answer')} exceeded the limits of a comparison and "
                f"counted as wrong (timeout_seconds: {self.config.timeout_seconds:g})",
                stacklevel=2,
            )

    def _is_right(self, sample: Sample) -> bool:
        reference = str(sample.column(self.config.column, self.name))
        seconds = self.config.timeout_seconds
        texts = {"reference": reference, "answer": sample.completion[-MAX_CHARACTERS:]}
        try:
            verdict = evaluate(_compare, seconds=seconds + _IMPORT_SECONDS, limit=seconds, **texts)
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


def _compare(reference: str, answer: str, limit: float) -> bool | None:
    return is_equal(reference, answer, limit)
