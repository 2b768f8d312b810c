"""A request that was let in: whose it is, and its body, read and worked on within the caller's share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.json_body import parse_body, read_body
from gym_fed.serving.http.waiting import RequestTimeout
from gym_fed.serving.pictures.wanted import is_wanted

T = TypeVar("T")


class Admitted:
    """A request whose caller is known and within its limits.

    Args:
        gateway: Lets it in.
        request: As it came.

    Attributes:
        caller: Who sent it.
        serving: What answers it.
        shares: Headers of its answer, of what the caller has left.

    Raises:
        GymError: It is not let in.
    """

    def __init__(self, gateway: Gateway, request: Request) -> None:
        self._gateway, self._request = gateway, request
        self.caller = gateway.gate.caller(request.headers)
        self.serving = gateway.open()
        self.shares = gateway.limits.admit(self.caller)
        self._held = gateway.bodies.hold(self.caller.name)

    async def body(self) -> bytearray:
        """The bytes of the body, for ``parsed``."""
        try:
            async with asyncio.timeout(self._gateway.request_timeout_seconds):
                return await read_body(self._request, self._held.add)
        except BaseException as error:
            self._held.end()
            if not isinstance(error, TimeoutError):
                raise
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED, "the request's body did not arrive in time"
            ) from error

    async def parsed(
        self,
        data: bytearray,
        work: Callable[[Any], T],
        *,
        given_up: Callable[[T], None] = lambda found: None,
    ) -> T:
        """What the work makes of the parsed body, on one of few threads: the event loop goes on meanwhile.

        Pictures are read by few requests at once, which end where their client leaves.

        Args:
            data: The bytes of the body.
            work: It.
            given_up: Gets what the work made after the client had left.
        """
        pictures_to_read = self.serving.service.pictures_to_read

        def begun() -> tuple[int, Any, T | None]:
            body = parse_body(data)
            return (pictures, body, None) if (pictures := pictures_to_read(body)) else (0, None, work(body))

        try:
            async with self._gateway.parser_slot(self.caller):
                pictures, body, found = await run_in_threadpool(begun)
            if not pictures:
                return cast(T, found)
            return await self._pictured(partial(work, body), pictures, given_up)
        finally:
            self._held.end()

    async def _pictured(self, work: Callable[[], T], pictures: int, given_up: Callable[[T], None]) -> T:
        gateway, caller, gone = self._gateway, self.caller.name, threading.Event()
        timeout = RequestTimeout(self._request.receive, gateway.request_timeout_seconds, gateway.stopped)
        await timeout.wait(gateway.picture_slots.take(caller, pictures))
        began = time.monotonic()

        def wanted() -> T:
            is_wanted.set(lambda: not gone.is_set())
            return work()

        def ended(task: asyncio.Future[T]) -> None:
            gateway.picture_slots.give_back(caller, pictures, time.monotonic() - began)

        def unused(task: asyncio.Future[T]) -> None:
            if not task.cancelled() and task.exception() is None:
                given_up(task.result())

        async def result() -> T:
            return await asyncio.shield(task)

        task = asyncio.ensure_future(run_in_threadpool(wanted))
        task.add_done_callback(ended)
        try:
            return await timeout.wait(result())
        except BaseException:
            gone.set()
            task.add_done_callback(unused)
            raise
