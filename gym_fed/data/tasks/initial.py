"""The task `initial`: the first letter and a dot."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Initial(Task):
    summary = "the first letter and a dot: 'initial: abc' -> 'a.'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 3, 8)
        return f"initial: {text}", f"{text[0]}."
