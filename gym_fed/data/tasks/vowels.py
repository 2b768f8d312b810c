"""The task `vowels`: the vowels left out."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task

_VOWELS = "aeiou"


class Vowels(Task):
    summary = "the vowels left out: 'no vowels: banana' -> 'bnn'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        syllables = [
            rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice(_VOWELS) for _ in range(rng.randint(2, 4))
        ]
        text = "".join(syllables)
        return f"no vowels: {text}", "".join(c for c in text if c not in _VOWELS)
