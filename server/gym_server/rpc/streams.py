"""Work streams: the open calls on which contributors wait for tasks, all served by one asyncio task.

A waiting stream costs no thread and no query. A sweep after every push, and every few seconds, marks the nodes of all
streams as connected. It wakes streams that have something to do: a task in the queue, a replaced key, or the end of all
rounds. An account may have a few streams; a newer one ends the oldest, so that a contributor can always reconnect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import select, update

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import KEEPALIVE_SECONDS
from gym_server.accounts.accounts import Session
from gym_server.rounds.queue import MessageQueue
from gym_server.rounds.steering import pause_of
from gym_server.store.database import Database, chunks
from gym_server.store.tables import accounts, messages, nodes

log = logging.getLogger("gym_server")
T = TypeVar("T")

_DRAIN_POLL_SECONDS = 0.1
_TOUCH_SECONDS = KEEPALIVE_SECONDS / 4
_LEAST_PAUSE_SECONDS = 0.05
"""Minimum time between two sweeps, in seconds."""


class Wakeups:
    """Wakes coroutines of the event loop from other threads when there is a task or a notice."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: set[asyncio.Event] = set()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def subscribe(self) -> asyncio.Event:
        event = asyncio.Event()
        self._events.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        self._events.discard(event)

    def notify(self) -> None:
        """Wake all waiters. Thread-safe."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set_all)

    async def drain(self, seconds: float) -> None:
        """Wait for at most twice ``seconds`` until all work streams have ended, and then for another ``seconds``."""
        for _ in range(int(2 * seconds / _DRAIN_POLL_SECONDS)):
            if not self._events:
                break
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await asyncio.sleep(seconds)

    def _set_all(self) -> None:
        for event in self._events:
            event.set()


@dataclass(eq=False)
class OpenStream:
    """An open work stream.

    Attributes:
        session: Session of the stream's caller.
        woken: Set when there is something to do.
        ended: Error with which the stream must end; None while it may continue.
    """

    session: Session
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: GymError | None = None
    notice: str = ""
    """The last pause notice that was sent."""
    task: str = ""
    """Id of the last task that was sent."""


class WorkStreams:
    """All open work streams of a hub. Not thread-safe: use it on the event loop's thread.

    Args:
        database: Database with nodes, accounts and messages.
        queue: The message queue, whose leases are expired here.
        wakeups: Signal that streams may have something to do.
        per_account: Maximum number of streams per account.
        is_finished: Function that returns True once all rounds are done; every stream is then woken.
    """

    def __init__(
        self,
        database: Database,
        queue: MessageQueue,
        wakeups: Wakeups,
        per_account: int,
        is_finished: Callable[[], bool],
    ) -> None:
        self._database, self._queue, self._wakeups = database, queue, wakeups
        self._per_account, self._is_finished = per_account, is_finished
        self._streams: list[OpenStream] = []  # oldest first
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    @asynccontextmanager
    async def opened(self, session: Session) -> AsyncIterator[OpenStream]:
        """Open a stream for the session's node, which counts as connected during the block.

        Raises:
            GymError: ``UNAUTHENTICATED`` if the node has been deleted since the session began.
        """
        stream = OpenStream(session)
        self._make_room(session)
        self._streams.append(stream)
        try:
            await asyncio.to_thread(self._arrive, session.node_id)
            if self._sweeper is None or self._sweeper.done():
                self._sweeper = asyncio.create_task(self._sweep())
            yield stream
        finally:
            self._streams.remove(stream)
            newer = [other for other in self._streams if other.session.node_id == session.node_id]
            for other in newer:  # the ended stream may have leased a task that its caller never received
                other.woken.set()
            if not newer:
                await asyncio.shield(asyncio.to_thread(self._touch, [session.node_id], self._queue.now()))

    def _make_room(self, session: Session) -> None:
        """End streams beyond the limits, oldest first: one per node and a few per account."""
        living = [
            s for s in self._streams if s.ended is None and s.session.contributor == session.contributor
        ]
        same = [stream for stream in living if stream.session.node_id == session.node_id]
        others = [stream for stream in living if stream not in same]
        for stream in (*same, *others[: max(0, len(others) + 1 - self._per_account)]):
            stream.ended = GymError(
                ErrorCode.QUOTA_EXCEEDED,
                f"{session.contributor} opened another work stream; at most {self._per_account} may be open at once, "
                "one per installation",
                "stop the other one first, or ask the coordinator for a higher limits.streams_per_account",
            )
            stream.woken.set()

    async def _sweep(self) -> None:
        """Serve all streams until none are left."""
        news = self._wakeups.subscribe()
        touched = 0.0
        try:
            while self._streams:
                news.clear()
                streams = list(self._streams)
                if time.monotonic() - touched >= _TOUCH_SECONDS:
                    touched = time.monotonic()
                    ids = sorted({stream.session.node_id for stream in streams})
                    await self._tried(
                        asyncio.to_thread(self._touch, ids, self._queue.now() + KEEPALIVE_SECONDS)
                    )
                if self._is_finished():
                    busy = set(streams)
                else:
                    found = await self._tried(asyncio.to_thread(self._busy, streams))
                    busy = set(streams) if found is None else found
                for stream in busy:
                    stream.woken.set()
                await asyncio.sleep(_LEAST_PAUSE_SECONDS)
                await wait_for_event(news, min(_TOUCH_SECONDS, self._queue.lease_seconds / 4))
        finally:
            self._wakeups.unsubscribe(news)

    async def _tried(self, work: Awaitable[T]) -> T | None:
        """Await database work; return None on failure, so that a short outage ends no stream."""
        try:
            return await work
        except Exception:  # drivers may raise anything; every stream is woken and checks for itself
            log.exception("serving %d work streams failed; trying again", len(self._streams))
            return None

    # ---- on threads ----

    def _busy(self, streams: list[OpenStream]) -> set[OpenStream]:
        """Return the streams that have something to do."""
        self._queue.expire()
        keys: dict[str, bytes] = {}
        with self._database.reading() as tx:
            found = pause_of(tx)
            pause = str(found) if found else ""
            queued = set(
                tx.scalars(select(messages.c.node_id).where(messages.c.state == "queued").distinct())
            )
            # An earlier stream of the node may have leased a task when its caller had already disconnected.
            leased = select(messages.c.node_id, messages.c.message_id).where(messages.c.state == "leased")
            held = {row.node_id: row.message_id for row in tx.execute(leased)}
            for some in chunks({stream.session.contributor for stream in streams}):
                row = select(accounts.c.contributor, accounts.c.public_key)
                active = row.where(accounts.c.contributor.in_(some), accounts.c.status == "active")
                keys.update({row.contributor: bytes(row.public_key) for row in tx.execute(active)})
        return {
            stream
            for stream in streams
            if stream.session.node_id in queued
            or held.get(stream.session.node_id, stream.task) != stream.task
            or keys.get(stream.session.contributor) != stream.session.public_key
            or stream.notice != pause
        }

    def _arrive(self, node_id: int) -> None:
        if not self._touch([node_id], self._queue.now() + KEEPALIVE_SECONDS):
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                "this installation was dropped, since the account has newer ones",
                "authenticate again",
            )

    def _touch(self, node_ids: list[int], until: float) -> int:
        """Record the time until which nodes count as connected; return the number of nodes that exist."""
        with self._database.transaction() as tx:
            return sum(
                tx.execute(
                    update(nodes).where(nodes.c.node_id.in_(some)).values(connected_until=until)
                ).rowcount
                for some in chunks(node_ids)
            )


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait at most ``seconds`` for an event; return True if it is set."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
