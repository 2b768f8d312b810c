"""The task `upper`: upper case."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters


class Upper(Task):
    summary = "upper case: 'upper: abC' -> 'ABC'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 9, rng.choice((string.ascii_lowercase, string.ascii_letters)))
        return f"upper: {text}", text.upper()
