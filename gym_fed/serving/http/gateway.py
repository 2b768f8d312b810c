"""What the HTTP server knows at a moment: what it serves, who is let in, whether it is loading, ready or leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.http.keys import Gate
from gym_fed.serving.openai.catalogue import Caller

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving

_LOADING_SECONDS, _LEAVING_SECONDS = 5, 10
_TURNS = 4
"""Of the 40 threads that read requests, those that one caller may have at once."""


class Gateway:
    """Shared by all requests; all but ``__init__`` is for the event loop's thread.

    Args:
        gate: Who is let in.
        request_timeout_seconds: Longest time for one request, waiting and streaming included.

    Attributes:
        serving: None until the model is loaded.
        active: Requests for answers that are under way.
        draining: Whether new ones are refused, because the server is about to leave.
        stopped: Set when those under way are broken off, too.
    """

    def __init__(self, gate: Gate, *, request_timeout_seconds: float) -> None:
        self.gate = gate
        self.request_timeout_seconds = request_timeout_seconds
        self.serving: Serving | None = None
        self.active = 0
        self.draining = False
        self.stopped = asyncio.Event()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A request for an answer, from its first byte to its last."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @asynccontextmanager
    async def turn_of(self, caller: Caller) -> AsyncIterator[None]:
        """Reading a request takes a thread, of which there are few: one caller has so many of them, and no more."""
        turns = self._turns.get(caller.name)
        if turns is None:
            self._turns[caller.name] = turns = asyncio.Semaphore(_TURNS)
        async with turns:
            yield

    def open(self) -> Serving:
        """What is served.

        Raises:
            GymError: ``UNAVAILABLE`` before it is loaded, and while leaving.
        """
        if self.draining:
            raise GymError(ErrorCode.UNAVAILABLE, "the server is shutting down", "try again in a moment")
        if self.serving is None:
            raise GymError(
                ErrorCode.UNAVAILABLE, "the model is being loaded", "GET /ready tells when it is there"
            )
        return self.serving

    def require_ready(self) -> None:
        """Refuse, for whoever balances load, what ``open`` refuses, and when the engine's steps fail or nobody gets in.

        Requests still get to an engine whose last steps failed, for the next that succeeds is what heals it.

        Raises:
            GymError: ``UNAVAILABLE``.
        """
        if not self.open().engine.stats().healthy:
            raise GymError(
                ErrorCode.UNAVAILABLE, "the engine fails", "the server's log tells why; restart it"
            )
        self.gate.require_usable()

    def retry_after(self, error: GymError) -> int | None:
        """Seconds of the header ``Retry-After``, for what may go better later."""
        if error.code is ErrorCode.BUSY and self.serving is not None:
            return max(1, round(self.serving.engine.retry_after_seconds()))
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.BUSY):
            return _LEAVING_SECONDS if self.draining else _LOADING_SECONDS
        return None
