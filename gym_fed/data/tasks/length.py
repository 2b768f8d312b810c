"""The task `length`: how many letters."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Length(Task):
    summary = "how many letters: 'length: abcd' -> '4'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 1, 9)
        return f"length: {text}", str(len(text))
