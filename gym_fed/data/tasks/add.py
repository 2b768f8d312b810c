"""The task `add`: a number below 100 and a digit."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task


class Add(Task):
    summary = "a number below 100 and a digit: 'add: 38+5' -> '43'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        a, b = rng.randrange(100), rng.randrange(10)
        return f"add: {a}+{b}", str(a + b)
