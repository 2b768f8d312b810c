"""Handle an admitted HTTP request: its caller, its body, and the wait for its answer.

A wait ends when the answer is complete, at the timeout, or when the client disconnects or the server stops.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gym_fed.core.bounded.pool import evaluation_owner
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import strict_json
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.openai.answers import StreamChunk
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.pictures.clips import is_wanted

T = TypeVar("T")


class ClientGone(Exception):
    """Raised if the client closes its connection."""


class Admitted:
    """A request whose caller is authenticated and within its limits.

    Attributes:
        caller: The caller.
        serving: The loaded parts of the server.
        shares: Response headers with the caller's remaining limits.

    Raises:
        GymError: If it is not admitted.
    """

    def __init__(self, gateway: Gateway, request: Request) -> None:
        self._gateway, self._request = gateway, request
        self.caller = gateway.authenticator.caller(request.headers)
        self.serving = gateway.open()
        self.shares = gateway.limits.admit(self.caller)
        self._held = gateway.bodies.hold(self.caller.name)

    async def body(self) -> bytearray:
        """Read the bytes of the body, for ``parsed``."""
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
        given_up: Callable[[T], None] = lambda result: None,
    ) -> T:
        """Parse the body, and run ``work`` on it in a thread of a small pool.

        Only a few requests read pictures at the same time, and reading stops when the client disconnects.

        Args:
            data: The bytes of the body.
            work: Function that computes the result from the parsed body.
            given_up: Called with a result that is ready only after the client has disconnected.
        """
        evaluation_owner.set(None if self.caller is LOCAL else self.caller.name)
        pictures_to_read = self.serving.service.pictures_to_read

        def begun() -> tuple[int, Any, T | None]:
            body = parse_body(data)
            return (pictures, body, None) if (pictures := pictures_to_read(body)) else (0, None, work(body))

        try:
            async with self._gateway.parser_slot(self.caller):
                pictures, body, result = await run_in_threadpool(begun)
            if not pictures:
                return cast(T, result)
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


MAX_BODY_BYTES = 8 * 2**20
MAX_VALUES = 2**18
"""Maximum number of JSON values in a body; larger than the number of tokens of a long context. The time for which
parsing holds the GIL grows with the number of values, not bytes."""

_MAX_QUOTES = 4 * MAX_VALUES
"""Maximum number of quotes in a body: two around each name and each value."""


class RequestTimeout:
    """Waits for the work of one request until its timeout, or until the client disconnects or the server stops.

    Args:
        receive: ASGI's ``receive``, after the request's body was read.
        seconds: The timeout of all waits together, counted from now.
        stopped: An event that is set when the server stops.
    """

    def __init__(self, receive: Receive, seconds: float, stopped: asyncio.Event) -> None:
        self._receive = receive
        self._seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds
        self._stopped = stopped

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work, and return its result; if the wait ends otherwise, cancel the work first.

        Raises:
            ClientGone: If the client closed its connection.
            GymError: ``DEADLINE_EXCEEDED``, ``UNAVAILABLE`` if the server stops, or the work's own error.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            seconds_left = max(0.0, self._until - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait(
                {task, gone, stopped}, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED
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
    """A stream of server-sent events that starts with a given chunk, so that earlier errors have their own HTTP status.

    A later failure is sent as the last chunk, without ``[DONE]``. Chunks with a ``type`` (Responses API) are sent as
    events with that name.

    Args:
        first: The first chunk.
        later: The remaining chunks.
        timeout: The timeout of the request.
        failure: Function that creates the last chunk of a failed stream.
        on_end: Called after the end of the stream, successful or not.
        with_done: True if ``[DONE]`` follows the last chunk.
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


async def read_body(request: Request, came: Callable[[int], None] = lambda size: None) -> bytearray:
    """Read the bytes of a request's body.

    Args:
        request: The request.
        came: Called with the size of each received part; may raise to refuse the body.

    Raises:
        GymError: ``TOO_LARGE``; ``USAGE`` for any content type except JSON in UTF-8, or a content encoding.
        ClientGone: If the client disconnects before the end of the body.
    """
    kind, _, more = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json":
        raise RequestError(f"content type {kind!r} is not application/json", hint="send JSON")
    charset = more.strip().lower().replace('"', "")
    if charset not in ("", "charset=utf-8", "charset=utf8"):
        raise RequestError(f"content type with {charset!r} is not supported: JSON is UTF-8")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(f"content encoding {encoding!r} is not supported", hint="send it uncompressed")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large(f"is larger than {MAX_BODY_BYTES} bytes")
    data = bytearray()
    try:
        async for part in request.stream():
            came(len(part))
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise _too_large(f"is larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:
        raise ClientGone from error
    return data


def parse_body(data: bytearray) -> Any:
    """Parse a body; too slow for the event loop.

    Raises:
        GymError: ``TOO_LARGE`` for too many values; ``USAGE`` for invalid JSON.
    """
    if _has_many_values(data):
        raise _too_large(f"has more than {MAX_VALUES:,} values")
    try:
        return strict_json(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", name="invalid_json") from error


def _has_many_values(data: bytearray) -> bool:
    """Return True if a body has more than ``MAX_VALUES`` separators of values outside strings."""
    if _marks(data) <= MAX_VALUES:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return plain.count(b'"') > _MAX_QUOTES or _marks(b"".join(plain.split(b'"')[::2])) > MAX_VALUES


def _marks(data: bytes | bytearray) -> int:
    return sum(map(data.count, (b"{", b"[", b",")))


def _too_large(problem: str) -> RequestError:
    return RequestError(f"the body {problem}", code=ErrorCode.TOO_LARGE, hint="send a smaller body")
