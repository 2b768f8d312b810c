"""The task `last`: the last letter of each word."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Last(Task):
    summary = "the last letter of each word: 'last: cat dog' -> 'tg'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        words = [letters(rng, 2, 4) for _ in range(rng.randint(2, 4))]
        return f"last: {' '.join(words)}", "".join(word[-1] for word in words)
