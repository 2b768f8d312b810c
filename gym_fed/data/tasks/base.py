"""What a generated text task is: one exact answer to a prompt, and the prompt alone decides it."""

from __future__ import annotations

import random
import string
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

Group = Literal["base", "contributor"]


class Task(ABC):
    """A task by its name, the value under ``data[].tasks``."""

    summary: ClassVar[str]
    """One line with an example."""

    group: ClassVar[Group] = "contributor"
    """``base`` tasks are what gym-nano was pre-trained on; it has never seen the others."""

    @staticmethod
    @abstractmethod
    def make(rng: random.Random) -> tuple[str, str]:
        """Draw one prompt and its answer."""


def letters(rng: random.Random, low: int, high: int, alphabet: str = string.ascii_lowercase) -> str:
    """A random string of ``low`` to ``high`` characters."""
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))
