"""The HTTP server's state: what it serves, who is authorized, and whether it is loading, ready or draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.held_bodies import HeldBodies
from gym_fed.serving.http.keys import Gate
from gym_fed.serving.http.picture_slots import PictureSlots
from gym_fed.serving.http.public_errors import PublicErrors
from gym_fed.serving.http.rate_limits import RateLimited, RateLimits
from gym_fed.serving.openai.catalogue import Caller

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving

_LOADING_SECONDS, _DRAINING_SECONDS = 5, 10
FORGET_SECONDS = 30.0
"""Between looks for stored answers whose time is over."""

_PARSERS_PER_CALLER = 4
"""Of the 40 threads that parse requests, those that one caller may have at once."""


class Gateway:
    """Shared by all requests; all but ``__init__`` is for the event loop's thread.

    Args:
        gate: Authenticates callers.
        request_timeout_seconds: Timeout of one request, queueing and streaming included.

    Attributes:
        serving: None until the model is loaded.
        active: Active requests for answers.
        draining: Whether new requests are refused, because the server is about to stop.
        stopped: Set when active requests are cancelled, too.
        limits: What each key has left of its share.
        errors: What of an error its caller gets.
        picture_slots: Who reads pictures next.
        bodies: Those that are held.
    """

    def __init__(self, gate: Gate, *, request_timeout_seconds: float) -> None:
        self.gate = gate
        self.request_timeout_seconds = request_timeout_seconds
        self.serving: Serving | None = None
        self.active = 0
        self.draining = False
        self.stopped = asyncio.Event()
        self.limits = RateLimits()
        self.errors = PublicErrors()
        self.picture_slots = PictureSlots()
        self.bodies = HeldBodies()
        self._parsers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request for an answer as active, from its first byte to its last."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @asynccontextmanager
    async def parser_slot(self, caller: Caller) -> AsyncIterator[None]:
        """Parsing a request takes one of few threads: limit how many one caller has at once."""
        slots = self._parsers.get(caller.name)
        if slots is None:
            self._parsers[caller.name] = slots = asyncio.Semaphore(_PARSERS_PER_CALLER)
        async with slots:
            yield

    async def watch(self) -> None:
        """Forget stored answers when their time is over, also while no request comes; until it is cancelled."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            if self.serving is not None:
                self.serving.service.forget_old_answers()

    def open(self) -> Serving:
        """The running server's parts.

        Raises:
            GymError: ``UNAVAILABLE`` before the model is loaded, and while draining.
        """
        if self.draining:
            raise GymError(ErrorCode.UNAVAILABLE, "the server is shutting down", "try again in a moment")
        if self.serving is None:
            raise GymError(
                ErrorCode.UNAVAILABLE, "the model is being loaded", "GET /ready answers 200 when it is loaded"
            )
        return self.serving

    def require_ready(self) -> None:
        """For load balancers: raise as ``open``, and when the engine's steps fail or the keys cannot be read.

        Requests still reach an engine whose last steps failed, because it is healthy again after a step that succeeds.

        Raises:
            GymError: ``UNAVAILABLE``.
        """
        if not self.open().engine.stats().healthy:
            raise GymError(ErrorCode.UNAVAILABLE, "the engine fails", "see the server's log; restart it")
        self.gate.require_usable()

    def retry_after(self, error: GymError) -> int | None:
        """Seconds of the header ``Retry-After``, for errors that may pass."""
        if isinstance(error, RateLimited):
            return error.retry_after
        if error.code is ErrorCode.BUSY and self.serving is not None:
            return max(1, round(self.serving.engine.retry_after_seconds()))
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.BUSY):
            return _DRAINING_SECONDS if self.draining else _LOADING_SECONDS
        return None
