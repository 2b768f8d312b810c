"""Waiting for an answer, whole or as server-sent events, no longer than its client, its time and the server allow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.openai.answers import StreamChunk
from gym_fed.serving.openai.pending import Pending
from gym_fed.serving.openai.refusals import error_body

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Patience:
    """How long one request is waited for; its time begins now.

    Args:
        receive: ASGI's, with the request's body read.
        seconds: Longest time, over all waits together.
        stopped: Set when the server leaves.
    """

    def __init__(self, receive: Receive, seconds: float, stopped: asyncio.Event) -> None:
        self._receive = receive
        self._seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds
        self._stopped = stopped

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Whatever ends the wait before, the work is cancelled and has ended.

        Raises:
            ClientGone: The client closed its connection.
            GymError: ``DEADLINE_EXCEEDED``, ``UNAVAILABLE`` when the server leaves, or what the work raises.
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
            "ask for fewer tokens, or raise request_timeout_seconds",
        )

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class EventStream(Response):
    """A stream whose first chunk is there: what can be refused has been, with a status of its own.

    What fails later is told by an event ``{"error": ...}``, after which there is no ``[DONE]``.
    """

    def __init__(
        self, pending: Pending, first: StreamChunk, rest: AsyncIterator[StreamChunk], patience: Patience
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._pending = pending
        self._first = first
        self._rest = rest
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                await self._patience.wait(self._send_all(send))
                last = b"data: [DONE]\n\n"
            except GymError as error:
                last = _event(error_body(error))
            await send({"type": "http.response.body", "body": last})
        except ClientGone:
            pass
        finally:
            self._pending.end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": _event(self._first), "more_body": True})
        async for chunk in self._rest:
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
