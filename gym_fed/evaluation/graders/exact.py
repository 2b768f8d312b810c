"""Exact match with a reference, optionally ignoring case and white space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gym_fed.config.train.graders import GraderConfig
from gym_fed.evaluation.graders.base import Grader, Sample


class ExactConfig(GraderConfig):
    """1 if the answer equals the reference, else 0."""

    column: str = "answer"
    """The column with the reference, or with a list of accepted references."""

    ignore_case: bool = False
    whitespace: Literal["exact", "strip", "collapse"] = "strip"
    """``strip`` ignores white space at both ends; ``collapse`` also replaces every run of it with one space."""


class Exact(Grader):
    """1 if the answer equals the reference or one of several references, else 0."""

    Settings = ExactConfig
    config: ExactConfig

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._is_right(sample)) for sample in samples]

    def _is_right(self, sample: Sample) -> bool:
        value = sample.column(self.config.column, self.name)
        references = value if isinstance(value, list | tuple) else [value]
        return self._normal(sample.completion) in {self._normal(str(reference)) for reference in references}

    def _normal(self, text: str) -> str:
        if self.config.whitespace == "strip":
            text = text.strip()
        elif self.config.whitespace == "collapse":
            text = " ".join(text.split())
        return text.casefold() if self.config.ignore_case else text
