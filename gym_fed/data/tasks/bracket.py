"""The task `bracket`: every letter in brackets."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Bracket(Task):
    summary = "every letter in brackets: 'bracket: ab' -> '(a)(b)'"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 5)
        return f"bracket: {text}", "".join(f"({c})" for c in text)
