"""The task `lower`: lower case."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters


class Lower(Task):
    summary = "lower case: 'lower: ABc' -> 'abc'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 9, rng.choice((string.ascii_uppercase, string.ascii_letters)))
        return f"lower: {text}", text.lower()
