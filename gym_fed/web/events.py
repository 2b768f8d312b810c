"""Server-sent events from one publisher to many readers; a slow reader does not delay the others.

An event is encoded once. Each reader has a bounded queue; one that falls behind receives ``reload`` and is
disconnected, and its page reloads the data. Events with an id belong to a stored sequence (the hub's ledger), and a
reader that reconnects with ``Last-Event-ID`` gets each of them exactly once.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import whole_number

MAX_READERS = 400
MAX_READERS_OF_ADDRESS = 64
QUEUE_LENGTH = 256
KEEPALIVE_SECONDS = 20.0
"""Seconds between comments that keep proxies from closing an idle stream."""


@dataclass(frozen=True)
class PageEvent:
    """An event for open pages.

    Attributes:
        kind: Name of the event that pages listen for.
        data: JSON value of the event.
        id: Position in the stored sequence; None for an event that is not stored.
        for_operators: True for an event that viewers must not see.
    """

    kind: str
    data: Any
    id: int | None = None
    for_operators: bool = False

    def encoded(self) -> bytes:
        """Encode the event as ``event``, ``id`` and ``data`` lines; JSON contains no newlines."""
        head = f"event: {self.kind}\n" + ("" if self.id is None else f"id: {self.id}\n")
        return f"{head}data: {json.dumps(self.data, separators=(',', ':'))}\n\n".encode()


RELOAD = PageEvent("reload", {"why": "this page fell behind"})


class _Reader:
    """The stream of one page."""

    def __init__(self, operator: bool) -> None:
        self.operator = operator
        self.queue: deque[tuple[int | None, bytes]] = deque()
        self.is_behind = False
        self.woken = asyncio.Event()


class Feed:
    """Distributes events to the open pages of one event loop. ``publish`` is thread-safe.

    Args:
        since: Called in a thread with an id, or None for a page without one. It returns the stored events after that
            id, oldest first, and the start of the stream.
    """

    def __init__(self, since: Callable[[int | None], Iterable[PageEvent]]) -> None:
        self._since = since
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: set[_Reader] = set()
        self._addresses: dict[str, int] = {}
        self.has_readers = threading.Event()
        """Set while a page is open; otherwise no events need to be collected."""

    def __len__(self) -> int:
        return len(self._readers)

    def publish(self, event: PageEvent) -> None:
        """Send an event to every open page."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._put, event, event.encoded())

    def close(self) -> None:
        """End all streams so that the server can stop. Call this in the loop's thread."""
        for reader in self._readers:
            reader.is_behind = True
            reader.woken.set()

    def response(
        self, last_event_id: str | None, address: str, *, operator: bool = False
    ) -> StreamingResponse:
        """Create the stream of one page.

        Args:
            last_event_id: Value of the header ``Last-Event-ID``; ignored if it is not a number.
            address: Client address, for the limit on streams per address.
            operator: True if an operator has opened the page.

        Raises:
            GymError: ``QUOTA_EXCEEDED`` if too many pages are open.
        """
        if len(self._readers) >= MAX_READERS or self._addresses.get(address, 0) >= MAX_READERS_OF_ADDRESS:
            raise GymError(
                ErrorCode.QUOTA_EXCEEDED,
                "too many pages are open",
                "close some of them, and reload",
            )
        last = whole_number(last_event_id or "", 18)
        return StreamingResponse(
            self._stream(last, address, operator),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def _stream(self, last: int | None, address: str, operator: bool) -> AsyncIterator[bytes]:
        self._loop = asyncio.get_running_loop()
        reader = _Reader(operator)
        self._readers.add(reader)
        self._addresses[address] = self._addresses.get(address, 0) + 1
        self.has_readers.set()
        try:
            sent = -1
            for event in await asyncio.to_thread(lambda: list(self._since(last))):
                sent = sent if event.id is None else event.id
                if operator or not event.for_operators:
                    yield event.encoded()
            while True:
                while reader.queue:
                    number, data = reader.queue.popleft()
                    if number is not None and number <= sent:
                        continue  # sent at the start of the stream
                    sent = sent if number is None else number
                    yield data
                if reader.is_behind:
                    yield RELOAD.encoded()
                    return
                reader.woken.clear()
                try:
                    await asyncio.wait_for(reader.woken.wait(), KEEPALIVE_SECONDS)
                except TimeoutError:
                    yield b": alive\n\n"
        finally:
            self._readers.discard(reader)
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
            if not self._readers:
                self.has_readers.clear()

    def _put(self, event: PageEvent, data: bytes) -> None:
        for reader in self._readers:
            if event.for_operators and not reader.operator:
                continue
            if len(reader.queue) >= QUEUE_LENGTH:
                reader.is_behind = True
                reader.queue.clear()
            elif not reader.is_behind:
                reader.queue.append((event.id, data))
            reader.woken.set()
