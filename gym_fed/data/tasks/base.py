"""The base class of generated text tasks, each with one exact answer that follows from the prompt."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Literal

Group = Literal["base", "contributor"]


class Task(ABC):
    """A generated task, named under ``data[].tasks``."""

    summary: str
    """One-line summary of the task, with an example."""

    group: Group = "contributor"
    """Group of the task; gym-nano was pre-trained only on the ``base`` tasks."""

    @abstractmethod
    def make(self, rng: random.Random) -> tuple[str, str]:
        """Draw one prompt and its answer."""
