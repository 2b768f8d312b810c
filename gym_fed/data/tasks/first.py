"""The task `first`: the first letter of each word."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class First(Task):
    summary = "the first letter of each word: 'first: cat dog' -> 'cd'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        words = [letters(rng, 2, 4) for _ in range(rng.randint(2, 4))]
        return f"first: {' '.join(words)}", "".join(word[0] for word in words)
