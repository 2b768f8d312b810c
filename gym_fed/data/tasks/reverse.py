"""The task `reverse`: the letters backwards."""

from __future__ import annotations

import random

from gym_fed.data.tasks.base import Task, letters


class Reverse(Task):
    summary = "the letters backwards: 'reverse: abc' -> 'cba'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 8)
        return f"reverse: {text}", text[::-1]
