"""The task `caesar`: every letter moved on by one."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters


class Caesar(Task):
    summary = "every letter moved on by one: 'shift: abz' -> 'bca'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 7)
        moved = str.maketrans(string.ascii_lowercase, string.ascii_lowercase[1:] + "a")
        return f"shift: {text}", text.translate(moved)
