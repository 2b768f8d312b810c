"""The task `swapcase`: upper for lower case and back."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters


class Swapcase(Task):
    summary = "upper for lower case and back: 'swap case: aBc' -> 'AbC'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 8, string.ascii_letters)
        return f"swap case: {text}", text.swapcase()
