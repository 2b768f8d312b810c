"""The base class of generated text tasks, each with one exact answer that follows from the prompt."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Literal

Group = Literal["base", "contributor"]


class Task(ABC):
    """A generated task, named under ``data[].tasks``."""

    summary: str
    """Summary of the task in one line, with an example."""

    group: Group = "contributor"
    """Group of the task; gym-nano was pre-trained on the ``base`` tasks only."""

    @abstractmethod
    def make(self, rng: random.Random) -> tuple[str, str]:
        """Draw one prompt and its answer."""
