"""How work inside a Flower ``ClientApp`` reports its progress, and learns that it should stop.

Flower hands an app a message and a context and nothing else, so the agent sets these hooks around the call.
In a stock Flower deployment nobody does, and they are silent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Progress = Callable[[str, int, int, float | None], None]
"""Phase (fetch, train, encode, upload), done, total, loss."""


@dataclass(frozen=True)
class Hooks:
    """What the agent listens to while an app works."""

    progress: Progress = lambda phase, done, total, loss: None
    should_stop: Callable[[], bool] = lambda: False
    now: Callable[[], float] = time.time
    """The hub's time, which signed manifests carry."""


_current: ContextVar[Hooks | None] = ContextVar("gym_client_hooks", default=None)


def current_hooks() -> Hooks:
    """The hooks of the call under way; silent ones where nobody set any."""
    return _current.get() or Hooks()


@contextmanager
def hooks_set(hooks: Hooks) -> Iterator[None]:
    """Set the hooks for the calls inside the block."""
    token = _current.set(hooks)
    try:
        yield
    finally:
        _current.reset(token)
