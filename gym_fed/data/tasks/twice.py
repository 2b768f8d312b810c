"""The task `twice`: the text twice."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Twice(Task):
    summary = "the text twice: 'twice: abc' -> 'abcabc'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 6)
        return f"twice: {text}", text * 2
