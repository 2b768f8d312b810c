"""Answers of the right length, in characters, words or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gym_fed.config.rewards import LengthConfig
from gym_fed.evaluation.graders.base import Grader, Sample


class Length(Grader):
    """1 inside the range; 0 from ``soft`` outside it; a straight line between."""

    def __init__(self, config: LengthConfig) -> None:
        self.config = config
        self.name = config.name or config.grader
        self._tokenizer: Any = None

    def setup(self) -> None:
        if self.config.tokenizer is not None:
            from gym_fed.models import load_tokenizer

            self._tokenizer = load_tokenizer(self.config.tokenizer)

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [self._reward(self._length(sample.completion)) for sample in samples]

    def _length(self, text: str) -> int:
        if self.config.unit == "tokens":
            return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return len(text.split()) if self.config.unit == "words" else len(text)

    def _reward(self, length: int) -> float:
        above = 0 if self.config.max is None else length - self.config.max
        outside = max(0, self.config.min - length, above)
        if not outside:
            return 1.0
        return max(0.0, 1.0 - outside / self.config.soft) if self.config.soft else 0.0
