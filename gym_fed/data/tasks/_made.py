"""Tasks that are one function each."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from gym_fed.data.tasks.base import Group, Task

Maker = Callable[[random.Random], tuple[str, str]]
TABLE: dict[str, MadeTask] = {}


@dataclass(frozen=True, kw_only=True)
class MadeTask(Task):
    """A task whose rows a function draws."""

    summary: str
    group: Group
    maker: Maker

    def make(self, rng: random.Random) -> tuple[str, str]:
        return self.maker(rng)


def task(name: str, summary: str, group: Group = "contributor") -> Callable[[Maker], Maker]:
    """Put a function into the table."""

    def add(maker: Maker) -> Maker:
        if name in TABLE:
            raise ValueError(f"two tasks are called {name!r}")
        TABLE[name] = MadeTask(summary=summary, group=group, maker=maker)
        return maker

    return add


def letters(rng: random.Random, low: int, high: int, alphabet: str = string.ascii_lowercase) -> str:
    """A random string of ``low`` to ``high`` characters."""
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))
