"""The task `number`: words as a number."""

from __future__ import annotations

import random

from gym_fed.data.tasks._number_words import number_word
from gym_fed.data.tasks.base import Task


class Number(Task):
    summary = "words as a number: 'number: forty-seven' -> '47'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        value = rng.randrange(1000)
        return f"number: {number_word(value)}", str(value)
