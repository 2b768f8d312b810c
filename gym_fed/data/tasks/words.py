"""The task `words`: a number in words."""

from __future__ import annotations

import random

from gym_fed.data.tasks._number_words import number_word
from gym_fed.data.tasks.base import Task


class Words(Task):
    summary = "a number in words: 'words: 47' -> 'forty-seven'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        value = rng.randrange(1000)
        return f"words: {value}", number_word(value)
