"""The task `size`: how many letters, in words."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Size(Task):
    summary = "how many letters, in words: 'size: abc' -> '3 letters'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 3, 8)
        return f"size: {text}", f"{len(text)} letters"
