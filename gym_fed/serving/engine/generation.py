"""The caller's end of one answer, its events and its whole, or of one embedding, and how to call it off."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import Completion, Event, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor

_Waker = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Generation:
    """One answer on its way. Events are kept until they are read, so a slow reader holds no one up.

    ``for event in generation`` or ``async for event in generation`` (one reader): the last event has a
    ``finish_reason``. An answer that fails raises its ``GymError`` there and in ``result``.

    Attributes:
        request: What was asked.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._call_off: Callable[[], None] | None = None  # the engine's end
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the reader of events
        self._ended = threading.Condition(lock)  # for those who wait for the whole: not woken by every token
        self._events: deque[Event] = deque()
        self._completion: Completion | None = None
        self._error: GymError | None = None
        self._told = False  # the reader has had the error
        self._wakers: list[_Waker] = []

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """Call it off: within one step its place is free, and it ends with ``cancelled``. Safe to call at any time."""
        if self._call_off is not None and not self.done:
            self._call_off()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole answer; whether events were read makes no difference.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (the answer goes on).
        """
        with self._ended:
            if not self._ended.wait_for(lambda: self.done, timeout):
                raise GymError(
                    ErrorCode.DEADLINE_EXCEEDED, f"no whole answer within {timeout} s", "wait longer"
                )
        return self._whole()

    async def result_async(self) -> Completion:
        """As ``result``, without holding up the event loop."""
        while not self.done:
            await self._wait()
        return self._whole()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self.done)
            event = self._next()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._changed:
                ready = bool(self._events) or self.done
                event = self._next() if ready else None
            if event is not None:
                return event
            if ready:
                raise StopAsyncIteration
            await self._wait()

    def _next(self) -> Event | None:
        if self._events:
            return self._events.popleft()
        if self._error is not None and not self._told:
            self._told = True
            raise self._error
        return None

    def _whole(self) -> Completion:
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    async def _wait(self) -> None:
        """Until something changes (or has, since the caller looked)."""
        waker = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            if self._events or self.done:
                return
            self._wakers.append(waker)
        try:
            await waker[1].wait()
        finally:
            with self._changed:
                if waker in self._wakers:
                    self._wakers.remove(waker)

    # The engine's end.

    def _put(self, event: Event, completion: Completion | None = None) -> None:
        with self._changed:
            if self.done:
                return
            self._events.append(event)
            self._completion = completion
            wakers = self._wake()
        _set(wakers)

    def _fail(self, error: GymError) -> None:
        with self._changed:
            if self.done:
                return
            self._error = error
            wakers = self._wake()
        _set(wakers)

    def _wake(self) -> list[_Waker]:
        self._changed.notify_all()
        if self.done:
            self._ended.notify_all()
        wakers, self._wakers = self._wakers, []
        return wakers


def _set(wakers: list[_Waker]) -> None:
    for loop, waker in wakers:
        try:
            loop.call_soon_threadsafe(waker.set)
        except RuntimeError:  # its event loop was closed: nobody reads any more
            continue


class HiddenMean:
    """Mean of the last hidden states of a text that is read in pieces."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, states: Tensor) -> None:
        """Of the next tokens: ``[tokens, hidden]``."""
        found = states.float().sum(dim=0)
        self._sum = found if self._sum is None else self._sum + found

    def unit(self) -> Tensor:
        """The mean scaled to length 1 (so that the sum will do): ``[hidden] float32``."""
        assert self._sum is not None
        found: Tensor = self._sum / self._sum.norm().clamp_min(1e-12)
        return found


class PendingEmbedding:
    """One embedding on its way: ``[hidden] float32``, the mean of the text's last hidden states, of length 1.

    Args:
        future: Set by the engine; whoever cancels it calls the work off.
    """

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Call it off: within one step its place is free. Safe to call at any time."""
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for it.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (it goes on); ``UNAVAILABLE``
                when it was called off.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED, f"no embedding within {timeout} s", "wait longer"
            ) from None
        except CancelledError:
            raise _called_off() from None

    async def result_async(self) -> Tensor:
        """As ``result``, without holding up the event loop. Whoever stops awaiting it calls the embedding off."""
        waiting = asyncio.wrap_future(self._future)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self.cancel()
                raise
            raise _called_off() from None


def _called_off() -> GymError:
    return GymError(ErrorCode.UNAVAILABLE, "the embedding was called off", "ask again")
