"""The task `double`: every letter twice."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Double(Task):
    summary = "every letter twice: 'double: abc' -> 'aabbcc'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 6)
        return f"double: {text}", "".join(c * 2 for c in text)
