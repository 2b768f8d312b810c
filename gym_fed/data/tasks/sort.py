"""The task `sort`: the letters in alphabetical order."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Sort(Task):
    summary = "the letters in alphabetical order: 'sort: cab' -> 'abc'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 6)
        return f"sort: {text}", "".join(sorted(text))
