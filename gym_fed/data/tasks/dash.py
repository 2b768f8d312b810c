"""The task `dash`: dashes between the letters."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Dash(Task):
    summary = "dashes between the letters: 'dash: abc' -> 'a-b-c'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 7)
        return f"dash: {text}", "-".join(text)
