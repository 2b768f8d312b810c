"""Whether anybody still waits for the pictures that a thread reads: it stops before the next one where nobody does."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from gym_fed.core.errors import ErrorCode, GymError

is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)
"""Set by who can be given up, for its own thread."""


def require_wanted() -> None:
    """Raises:
    GymError: ``INTERRUPTED``, which nobody reads.
    """
    if not is_wanted.get()():
        raise GymError(ErrorCode.INTERRUPTED, "nobody waits for these pictures any more")
