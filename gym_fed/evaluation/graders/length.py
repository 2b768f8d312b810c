"""A grader of the length of answers in characters, words or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from gym_fed.config.train.graders import GraderConfig
from gym_fed.evaluation.graders.base import Grader, Sample


class LengthConfig(GraderConfig):
    """1 if the answer's length is in a range; outside it, the reward falls linearly to 0."""

    unit: Literal["characters", "words", "tokens"] = "words"
    min: int = Field(default=0, ge=0)
    max: int | None = Field(default=None, ge=0)
    soft: int = Field(default=0, ge=0)
    """Distance outside the range at which the reward reaches 0; 0 gives no reward outside the range."""

    tokenizer: str | None = None
    """The model whose tokenizer counts tokens."""

    @model_validator(mode="after")
    def _range(self) -> LengthConfig:
        if (self.unit == "tokens") != (self.tokenizer is not None):
            raise ValueError("tokenizer is required for unit tokens, and allowed only there")
        if self.max is not None and self.max < self.min:
            raise ValueError("max is below min")
        if self.max is None and self.min == 0:
            raise ValueError("set min, max or both")
        return self


class Length(Grader):
    """Return 1 for a length inside the range, falling linearly to 0 over ``soft`` outside of it."""

    Settings = LengthConfig
    config: LengthConfig

    def __init__(self, config: LengthConfig) -> None:
        super().__init__(config)
        self._tokenizer: Any = None

    def setup(self) -> None:
        if self.config.tokenizer is not None:
            from gym_fed.base.models import load_tokenizer

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
