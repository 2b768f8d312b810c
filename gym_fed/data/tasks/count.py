"""The task `count`: how often a letter occurs."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters


class Count(Task):
    summary = "how often a letter occurs: 'count a: banana' -> '3'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        wanted = rng.choice(string.ascii_lowercase)
        others = rng.sample(string.ascii_lowercase, 3)
        text = letters(rng, 2, 6, wanted * 3 + "".join(others))
        return f"count {wanted}: {text}", str(text.count(wanted))
