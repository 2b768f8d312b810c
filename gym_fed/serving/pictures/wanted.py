"""Whether anybody still waits for the media of a request."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from gym_fed.core.errors import ErrorCode, GymError

is_wanted: ContextVar[Callable[[], bool]] = ContextVar("is_wanted", default=lambda: True)
"""Function that returns False when nobody waits for the media any more; set by the caller in its own context."""


def require_wanted() -> None:
    """Stop reading media that nobody waits for.

    Raises:
        GymError: ``INTERRUPTED`` if nobody waits any more.
    """
    if not is_wanted.get()():
        raise GymError(ErrorCode.INTERRUPTED, "nobody waits for these pictures any more")
