"""``example_vowels``: the share of vowels among an answer's letters."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed.config.train.graders import GraderConfig
from gym_fed.evaluation.graders.base import Grader, Sample


class VowelsConfig(GraderConfig):
    """Its entry of ``graders``."""

    vowels: str = "aeiou"


class ExampleVowels(Grader):
    Settings = VowelsConfig
    config: VowelsConfig

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        def share(text: str) -> float:
            letters = [c for c in text.lower() if c.isalpha()]
            return sum(c in self.config.vowels for c in letters) / max(1, len(letters))

        return [share(sample.completion) for sample in samples]
