"""The task `ends`: first and last letter exchanged."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters


class Ends(Task):
    summary = "first and last letter exchanged: 'swap ends: abcd' -> 'dbca'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        first, last = rng.sample(string.ascii_lowercase, 2)
        middle = letters(rng, 1, 5)
        return f"swap ends: {first}{middle}{last}", f"{last}{middle}{first}"
