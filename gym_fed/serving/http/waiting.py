"""Wait for an answer, whole or as server-sent events, until it is done, times out, or client or server stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.answers import StreamChunk

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection."""


class RequestTimeout:
    """Waits for one request's work until its timeout, its client's disconnection or the server's stop.

    Args:
        receive: ASGI's ``receive``, after the request's body was read.
        seconds: The timeout of all waits together, which starts now.
        stopped: Set when the server stops.
    """

    def __init__(self, receive: Receive, seconds: float, stopped: asyncio.Event) -> None:
        self._receive = receive
        self._seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds
        self._stopped = stopped

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result. If anything else ends the wait, the work is cancelled first.

        Raises:
            ClientGone: If the client closed its connection.
            GymError: ``DEADLINE_EXCEEDED``, ``UNAVAILABLE`` if the server stops, or the work's own error.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            left = max(0.0, self._until - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait(
                {task, gone, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for waiter in (gone, stopped):
                waiter.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task in done:
            return task.result()
        if gone in done:
            raise ClientGone
        if stopped in done:
            raise GymError(ErrorCode.UNAVAILABLE, "the server is shutting down", "try again in a moment")
        raise GymError(
            ErrorCode.DEADLINE_EXCEEDED,
            f"the answer took more than {self._seconds:g} s",
            "request fewer tokens, or raise request_timeout_seconds",
        )

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class EventStream(Response):
    """A stream of server-sent events whose first chunk is known, so that earlier errors have a status of their own.

    A later failure is sent as the last chunk, without ``[DONE]``. Chunks with a ``type``, those of the Responses API,
    are events of that name.

    Args:
        first: The first chunk.
        later: The remaining chunks.
        timeout: The timeout of the whole request.
        failure: Makes the last chunk of a stream that fails.
        on_end: Called once the stream has ended, successfully or not.
        with_done: Whether ``[DONE]`` follows the last chunk.
    """

    def __init__(
        self,
        first: StreamChunk,
        later: AsyncIterator[StreamChunk],
        timeout: RequestTimeout,
        failure: Callable[[GymError], StreamChunk],
        on_end: Callable[[], None],
        *,
        with_done: bool,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._later = later
        self._timeout = timeout
        self._failure = failure
        self._on_end = on_end
        self._done = b"data: [DONE]\n\n" if with_done else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                await self._timeout.wait(self._send_all(send))
                last = self._done
            except GymError as error:
                last = _event(self._failure(error))
            await send({"type": "http.response.body", "body": last})
        except ClientGone:
            pass
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": _event(self._first), "more_body": True})
        async for chunk in self._later:
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})


def _event(data: StreamChunk) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
