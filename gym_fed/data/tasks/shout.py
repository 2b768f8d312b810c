"""The task `shout`: upper case with a bang."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Shout(Task):
    summary = "upper case with a bang: 'shout: abc' -> 'ABC!'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 3, 8)
        return f"shout: {text}", f"{text.upper()}!"
