"""Who reads pictures next: a request with pictures may take seconds of a thread, and there are few threads.

Of all requests few read pictures at once, so that those of text always find a thread. The next one is that with which
its caller will have used the least time, as in weighted fair queueing. So many pictures do not keep few ones waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from gym_fed.core.errors import ErrorCode, GymError

SLOTS = 3
PER_CALLER = 2
"""Of the slots; one picture is prepared while another is in the vision tower."""
MOST_WAITING = 16
"""Requests of one caller, each of which holds its body."""

_FIRST_GUESS = 0.1
"""Seconds a picture."""
_WEIGHT = 0.1
"""Of the last request in the mean."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    caller: str
    pictures: int
    turn: asyncio.Future[None]


class PictureSlots:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: list[_Waiter] = []
        self._running: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._least = 0.0
        """Of the seconds of those whose turn came; who comes anew begins there."""
        self._per_picture = _FIRST_GUESS

    async def take(self, caller: str, pictures: int) -> None:
        """Wait for a slot, which ``give_back`` frees again.

        Args:
            caller: Of the request.
            pictures: How many it has.

        Raises:
            GymError: ``BUSY``.
        """
        if sum(one.caller == caller for one in self._waiting) >= MOST_WAITING:
            raise GymError(
                ErrorCode.BUSY,
                f"{MOST_WAITING} requests of this user wait to have their pictures read",
                "try again when some are answered",
            )
        waiter = _Waiter(caller, pictures, asyncio.get_running_loop().create_future())
        self._seconds[caller] = max(self._seconds.get(caller, 0.0), self._least)
        self._waiting.append(waiter)
        self._next()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.give_back(caller, 0, 0.0)
            raise

    def give_back(self, caller: str, pictures: int, seconds: float) -> None:
        """Free a slot that was held for so long, to read so many."""
        self._running[caller] -= 1
        if pictures:
            self._per_picture += _WEIGHT * (seconds / pictures - self._per_picture)
        self._seconds[caller] += seconds
        self._next()

    def _used_then(self, one: _Waiter) -> float:
        """Seconds of a caller when this request is answered."""
        return self._seconds[one.caller] + one.pictures * self._per_picture

    def _next(self) -> None:
        while self._running.total() < SLOTS:
            able = [one for one in self._waiting if self._running[one.caller] < PER_CALLER]
            if not able:
                break
            first = min(able, key=self._used_then)  # of equals the oldest
            self._waiting.remove(first)
            self._running[first.caller] += 1
            self._least = max(self._least, self._seconds[first.caller])
            first.turn.set_result(None)
        self._running = +self._running
        active = self._running.keys() | {one.caller for one in self._waiting}
        self._seconds = {
            caller: seconds
            for caller, seconds in self._seconds.items()
            if caller in active or seconds > self._least
        }
