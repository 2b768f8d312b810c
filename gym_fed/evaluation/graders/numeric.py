r"""The final number of an answer, compared exactly or within a tolerance.

Numbers are read as fractions, so that ``0.1``, ``1/10`` and ``\frac{1}{10}`` are the same. ``1,234`` has a thousands
separator, ``1 1/2`` is one and a half; digits with other commas or points between them, such as ``1.234.567``, are not
a number. Currency and percent signs are ignored. ``#### 42`` is GSM8K's mark (Cobbe et al. 2021),
``\boxed{42}`` that of MATH (Hendrycks et al. 2021).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-−])?\s?\$?\s?(?:"
    r"(?:(?P<whole>\d{1,400}) ?)?\\[dt]?frac\s*(?:(?P<top>\d)|\{\s*(?P<long_top>-?\d{1,400})\s*\})"
    r"\s*(?:(?P<bottom>\d)|\{\s*(?P<long_bottom>\d{1,400})\s*\})"
    r"|(?P<units>\d{1,400}) (?P<part>\d{1,400})\s?/\s?(?P<of>\d{1,400})(?![\d/.])"
    rf"|(?P<value>{_DECIMAL})(?![.,]?\d)(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w))?"
    r"(?:\s?/\s?(?P<over>\d{1,400})(?![\d/.]))?"
    r"|\d[\d.,]*)"
)


class NumericConfig(GraderConfig):
    """1 if the answer's number equals the reference's, else 0."""

    column: str = "answer"
    where: Literal["auto", "last", "hashes", "boxed"] = "auto"
    r"""The number that is compared: the last one, the one after ``####`` (GSM8K), or the one in the last ``\boxed{}``.
    ``auto`` prefers ``####``, then ``\boxed{}``, then the last number."""

    absolute_tolerance: float = Field(default=0.0, ge=0)
    relative_tolerance: float = Field(default=0.0, ge=0)
    """Tolerance as a share of the reference; a number is correct if either tolerance allows it."""


class Numeric(Grader):
    """1 if the answer's number equals the reference's, else 0."""

    Settings = NumericConfig
    config: NumericConfig

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._is_right(sample)) for sample in samples]

    def _is_right(self, sample: Sample) -> bool:
        reference = sample.column(self.config.column, self.name)
        expected = number_in(str(reference), "auto")
        if expected is None:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {self.name}: {self.config.column!r} contains no number: {str(reference)[:60]!r}",
                "use a number, or grade this data with exact",
            )
        number = number_in(sample.completion, self.config.where)
        if number is None:
            return False
        relative = Fraction(self.config.relative_tolerance) * abs(expected)
        return abs(number - expected) <= max(Fraction(self.config.absolute_tolerance), relative)


def number_in(text: str, where: str = "auto") -> Fraction | None:
    """Parse the number in a text; None if there is none.

    Args:
        where: ``last``, ``hashes``, ``boxed`` or ``auto``; see ``NumericConfig``.
    """
    if where in ("auto", "hashes") and "####" in text:
        return _first(text.rpartition("####")[2])
    if where in ("auto", "boxed") and "\\boxed{" in text:
        return _last(_braced(text.rpartition("\\boxed{")[2]))
    return _last(text) if where in ("auto", "last") else None


def _braced(text: str) -> str:
    """Return the text up to the brace that closes one opened before ``text``."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text


def _first(text: str) -> Fraction | None:
    match = _NUMBER.search(text)
    return _value(match) if match else None


def _last(text: str) -> Fraction | None:
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return None for digits that are not a number, such as ``1.234.567`` and ``1,2``."""
    whole = Fraction(0)
    if (top := match["top"] or match["long_top"]) is not None:
        whole, value = Fraction(int(match["whole"] or 0)), Fraction(int(top))
        over = int(match["bottom"] or match["long_bottom"])
    elif match["units"] is not None:
        whole, value, over = Fraction(int(match["units"])), Fraction(int(match["part"])), int(match["of"])
        if value >= over:
            whole = Fraction(0)  # two adjacent numbers, not a mixed one
    elif match["value"] is not None:
        value = Fraction(match["value"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0)
        over = int(match["over"] or 1)
    else:
        return None
    if over == 0:
        return None
    return -(whole + value / over) if match["sign"] else whole + value / over
