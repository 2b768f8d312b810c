"""The caller's handles of an answer and of an embedding: events, result and cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import CompletionOutput, Event, GenerationRequest

if TYPE_CHECKING:
    from torch import Tensor

_Waker = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Generation:
    """One answer in progress. Events are kept until they are read, so a slow reader delays nobody else.

    ``for event in generation`` or ``async for event in generation`` (one reader): the last event has a
    ``finish_reason``. An answer that fails raises its ``GymError`` there and in ``result``.

    Attributes:
        request: The submitted request.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._on_cancel: Callable[[], None] | None = None  # set by the engine
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the reader of events
        self._ended = threading.Condition(
            lock
        )  # for callers of ``result``, which are not woken by every token
        self._events: deque[Event] = deque()
        self._completion: CompletionOutput | None = None
        self._error: GymError | None = None
        self._error_raised = False  # by the reader of events
        self._wakers: list[_Waker] = []

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """Cancel the answer: it ends with ``cancelled`` within one step. Safe to call at any time."""
        if self._on_cancel is not None and not self.done:
            self._on_cancel()

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """Wait for the whole answer, whether or not its events were read.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (the answer continues).
        """
        with self._ended:
            if not self._ended.wait_for(lambda: self.done, timeout):
                raise GymError(
                    ErrorCode.DEADLINE_EXCEEDED, f"no whole answer within {timeout} s", "wait longer"
                )
        return self._whole()

    async def result_async(self) -> CompletionOutput:
        """Like ``result``, without blocking the event loop."""
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
        if self._error is not None and not self._error_raised:
            self._error_raised = True
            raise self._error
        return None

    def _whole(self) -> CompletionOutput:
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    async def _wait(self) -> None:
        """Wait until an event or the end arrives; return at once if one has."""
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

    # For the engine.

    def _put(self, event: Event, completion: CompletionOutput | None = None) -> None:
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
        except RuntimeError:  # its event loop was closed, so there is no reader any more
            continue


class PendingEmbedding:
    """One embedding in progress: ``[hidden] float32``, the normalised mean of the text's last hidden states.

    Args:
        future: Set by the engine; cancelling it cancels the request.
    """

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Cancel the embedding: its place is free within one step. Safe to call at any time."""
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for the embedding.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (it continues);
                ``UNAVAILABLE`` when it was cancelled.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED, f"no embedding within {timeout} s", "wait longer"
            ) from None
        except CancelledError:
            raise _cancelled() from None

    async def result_async(self) -> Tensor:
        """Like ``result``, without blocking the event loop. Cancelling the awaiting task cancels the embedding."""
        waiting = asyncio.wrap_future(self._future)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self.cancel()
                raise
            raise _cancelled() from None


def _cancelled() -> GymError:
    return GymError(ErrorCode.UNAVAILABLE, "the embedding was cancelled", "request it again")
