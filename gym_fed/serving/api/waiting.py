"""Waiting for an answer, but no longer than its client, the time it may take, and the server's own life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from gym_fed.errors import ErrorCode, GymError

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


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
