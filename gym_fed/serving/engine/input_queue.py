"""The queue between callers' threads and the engine's thread: new requests and cancellations.

Requests beyond ``max_queued`` are refused with the seconds after which to retry.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.serving import EngineConfig
    from gym_fed.serving.engine.sequence import ScheduledRequest
    from gym_fed.serving.engine.stats import Counters

_LONGEST_RETRY = 600
_PAUSE_SECONDS = 0.001
"""Seconds that a request to an idle engine waits for others of the same burst."""
_BURST_SECONDS = 0.008


class RequestLoop(Protocol):
    """The interface of the loop behind the queue, with its waiting and running requests."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    def waiting_of(self, user: str) -> int:
        """Count the waiting requests of one user."""

    def put(self, request: ScheduledRequest) -> None:
        """Append a new request to its user's queue."""


class InputQueue:
    """The requests and cancellations that the engine's thread has not taken yet.

    Args:
        config: The engine's config, which has the maximum number of waiting requests.
        loop: The engine's loop, whose waiting and running requests also count.
        counters: Used to estimate when a refused request may be sent again.
        on_change: Called on the caller's thread after an addition, for a consumer that does not use ``wait``.

    Attributes:
        refused: Requests that were refused because too many waited.
        closing: True if all new requests are refused.
        broken: Why the engine's loop failed; None if it did not.
    """

    def __init__(
        self,
        config: EngineConfig,
        loop: RequestLoop,
        counters: Counters,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._loop, self._counters = config, loop, counters
        self._on_change = on_change
        self._changed = threading.Condition()
        self._arrived: list[ScheduledRequest] = []
        self._cancelled: list[ScheduledRequest] = []
        self.refused = 0
        self.closing = False
        self.broken: GymError | None = None

    # May be called from any thread.

    def __len__(self) -> int:
        return len(self._arrived)

    def require_room(self, user: str) -> None:
        """Refuse a new request if too many wait.

        Raises:
            GymError: ``BUSY`` or ``UNAVAILABLE``.
        """
        with self._changed:
            self._check_room(user, 1)

    def put(self, requests: Sequence[ScheduledRequest]) -> None:
        """Append requests of one user, which the engine's thread takes together.

        Raises:
            GymError: See ``require_room``; none of them is appended then.
        """
        with self._changed:
            self._check_room(requests[0].user, len(requests))
            self._arrived += requests
            self._changed.notify_all()
        self._on_change()

    def cancel(self, request: ScheduledRequest) -> None:
        """Cancel a request that is in the queue or in the loop."""
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify_all()
        self._on_change()

    def close(self) -> None:
        """Refuse all new requests, and stop the engine's thread."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()
        self._on_change()

    def retry_after_seconds(self) -> int:
        """Estimate the wait of a new request: the mean time of the last answers divided by their concurrency."""
        seconds = self._counters.seconds_a_request()
        if seconds is None:
            return 1
        return min(_LONGEST_RETRY, max(1, math.ceil(seconds / max(1, self._loop.running))))

    def _check_room(self, user: str, num_new: int) -> None:
        if self.broken is not None:
            raise self.broken
        if self.closing:
            raise GymError(ErrorCode.UNAVAILABLE, "the engine is closed", "restart the server")
        free = max(0, self._config.max_concurrent - self._loop.running)
        waiting = self._loop.waiting + len(self._arrived)
        own = self._loop.waiting_of(user) + sum(request.user == user for request in self._arrived)
        for count, most, who in (
            (waiting, self._config.max_queued, "waiting requests"),
            (own, self._config.max_queued_per_user, "waiting requests of this user"),
        ):
            if count + num_new > most + free:
                self.refused += 1
                seconds = self.retry_after_seconds()
                raise GymError(
                    ErrorCode.BUSY, f"too many {who}: {count}", f"try again in {counted(seconds, 'second')}"
                )

    # Called on the engine's thread.

    def wait(self, timeout: float | None) -> bool:
        """Wait until there is a request to take or the engine closes; return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(self._ready, timeout)

    def gather(self) -> None:
        """Wait while requests arrive in quick succession, for at most a few milliseconds.

        If an idle engine took the first of a burst alone, it would prefill the others in small chunks while it decodes,
        and every answer would take longer.
        """
        until = time.monotonic() + _BURST_SECONDS
        with self._changed:
            count = 0
            while len(self._arrived) > count and not self.closing and time.monotonic() < until:
                count = len(self._arrived)
                self._changed.wait(_PAUSE_SECONDS)

    def take(self) -> list[ScheduledRequest] | None:
        """Move new requests to the loop, and return the requests to cancel; None if the engine is closing."""
        with self._changed:
            if self.closing:
                return None
            for request in self._arrived:
                self._loop.put(request)
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def shut(self, error: GymError | None) -> list[ScheduledRequest]:
        """Refuse all new requests, with ``error`` if given, and return the requests that never reached the loop."""
        with self._changed:
            self.closing, self.broken = True, error
            arrived, self._arrived = self._arrived, []
        return arrived

    def _ready(self) -> bool:
        return bool(self.closing or self._arrived or self._cancelled)
