"""The task `copy`: repeat the text."""

from __future__ import annotations

import random
import string

from gym_fed.data.tasks.base import Task, letters

_MIXED = string.ascii_letters + string.digits + " .,!?'-"


class Copy(Task):
    summary = "repeat the text: 'copy: Ab 3!' -> 'Ab 3!'"
    group = "base"

    @staticmethod
    def make(rng: random.Random) -> tuple[str, str]:
        alphabet = rng.choice((string.ascii_lowercase, string.ascii_letters, _MIXED))
        text = letters(rng, 2, 10, alphabet).strip() or "a"
        return f"copy: {text}", text
