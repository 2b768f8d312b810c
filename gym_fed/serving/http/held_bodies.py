"""Bytes of requests' bodies that are held until they are read: bounded for each caller, and by that in all.

A body may come slowly, and hundreds of connections each may send one. Without a bound a single key fills the memory.
"""

from __future__ import annotations

from collections import Counter

from gym_fed.core.errors import ErrorCode, GymError

MOST = 1 << 30
"""Of all callers, shared evenly among those that hold some."""
MOST_OF_CALLER = 128 << 20
LEAST_OF_CALLER = 16 << 20
"""A caller always has so much: two bodies of the largest size."""


class HeldBodies:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._bytes.total()

    def hold(self, caller: str) -> HeldBody:
        """A body that begins to come."""
        return HeldBody(self._bytes, caller)


class HeldBody:
    """Use ``HeldBodies.hold``.

    Args:
        held: Bytes by caller.
        caller: Whose it is.
    """

    def __init__(self, held: Counter[str], caller: str) -> None:
        self._held, self._caller, self._own = held, caller, 0

    def add(self, size: int) -> None:
        """Some of it has come.

        Raises:
            GymError: ``BUSY`` where its caller holds too much.
        """
        self._own += size
        self._held[self._caller] += size
        share = min(MOST_OF_CALLER, max(LEAST_OF_CALLER, MOST // len(self._held)))
        if self._held[self._caller] > share:
            raise GymError(
                ErrorCode.BUSY,
                f"requests of this user that are not read yet have more than {share:,} bytes",
                "send fewer large requests at once",
            )

    def end(self) -> None:
        """It is read, or given up."""
        self._held[self._caller] -= self._own
        self._own = 0
        if not self._held[self._caller]:
            del self._held[self._caller]
