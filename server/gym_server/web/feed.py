"""The hub's state as server-sent events: one thread polls while a page is open, and all pages receive the changes.

A ledger event has the entry's sequence number as its id. A page that reconnects with ``Last-Event-ID`` gets the later
entries from the database, so no entry is missing or sent twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.web.events import RELOAD, Feed, PageEvent
from gym_server.rounds.recipes import LiveConfig
from gym_server.state import HubState
from gym_server.store.tables import ledger
from gym_server.store.unavailable import StoreUnavailable
from gym_server.strategy.lease_history import LeaseHistoryCache
from gym_server.web.entries import entry_events
from gym_server.web.home import snapshot

log = logging.getLogger("gym_server")

_LEAST_SECONDS = 0.25
"""Minimum time between two polls, in seconds (4 Hz)."""
_UNCOUNTED_SECONDS = 1.0
"""Interval between polls of a database without a change counter, in seconds."""
_MOST_SECONDS = 10.0
"""Maximum time between two reads of the state, in seconds, since nodes can disconnect without a write to the database.
"""
_MAX_MISSED = 500
"""Maximum number of entries sent to a reconnecting page; a page that missed more reloads its data."""


class HubFeed:
    """Publishes the changes of a hub.

    Events: ``snapshot`` (the state of the round, see ``gym_server.web.home``); the ledger events ``verdict``,
    ``version`` and ``ledger``, each an entry (``gym_server.web.entries``); and ``position``, the number of entries at
    the time a page connects.
    """

    def __init__(self, state: HubState, live_config: LiveConfig, lease_histories: LeaseHistoryCache) -> None:
        self._state, self._live_config = state, live_config
        self._lease_histories = lease_histories
        self.feed = Feed(self._since)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="web-feed", daemon=True)
        self._lock = threading.Lock()
        self._position = self._size()
        """The last entry that was published, or skipped because no page was open."""
        self._seen: int | None = None
        self._shown: dict[str, Any] | None = None
        """The last state sent to open pages; None if there are no open pages."""
        self.looks = 0
        """Number of times that the state was read for open pages."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def _since(self, last: int | None) -> Iterator[PageEvent]:
        """Yield the first events of a stream: the entries that a page missed, the ledger's position, and the state."""
        with self._lock:
            size = self._size()
        if last is not None and not 0 <= size - last <= _MAX_MISSED:
            yield RELOAD  # the page missed too many entries, or the hub was restored from an older state
            return
        if last is not None:
            yield from self._entries(last, size - last)
        yield PageEvent("position", {"sequence": size}, size)
        # The page is already registered, so it also receives later states.
        yield PageEvent(
            "snapshot", self._shown or snapshot(self._state, self._live_config.current, self._lease_histories)
        )

    def _watch(self) -> None:
        """Poll until the feed stops, and continue after database errors."""
        is_blind = False
        while not self._ended.is_set():
            try:
                with self._state.database.change_counter() as counter:
                    while not self._ended.is_set():
                        if self.feed.has_readers.wait(_UNCOUNTED_SECONDS):
                            self._publish(counter)
                        else:
                            self._skip(counter())
                        is_blind = False
            except (
                SQLAlchemyError,
                StoreUnavailable,
            ) as error:  # the hub continues; pages keep the last state
                if not is_blind:
                    log.warning("the dashboard cannot read the state, and keeps trying: %s", error)
                is_blind, self._seen, self._shown = True, None, None
                self._ended.wait(_UNCOUNTED_SECONDS)

    def _skip(self, count: int | None) -> None:
        """Skip entries that were written while no page was open; a page that opens later reads its position itself."""
        with self._lock:
            if not self.feed.has_readers.is_set() and (count is None or count != self._seen):
                self._position, self._seen = self._size(), count

    def _publish(self, counter: Callable[[], int | None]) -> None:
        """Publish changes while a page is open."""
        seen, looked_at, self._shown = None, 0.0, None
        while self.feed.has_readers.is_set():
            count = counter()  # read before polling, so that a change during the poll is noticed
            is_idle = count is not None and count == seen
            if not is_idle or time.monotonic() - looked_at > _MOST_SECONDS:
                seen, looked_at = count, time.monotonic()
                self.looks += 1
                for event in self._entries(self._position, _MAX_MISSED):
                    self.feed.publish(event)
                    self._position = event.id or self._position
                state = snapshot(self._state, self._live_config.current, self._lease_histories)
                if state != self._shown:
                    self._shown = state
                    self.feed.publish(PageEvent("snapshot", state))
            if self._ended.wait(_UNCOUNTED_SECONDS if count is None else _LEAST_SECONDS):
                break
        self._shown = None

    def _size(self) -> int:
        with self._state.database.reading() as tx:
            return int(tx.scalar(select(func.max(ledger.c.sequence))) or 0)

    def _entries(self, after: int, most: int) -> list[PageEvent]:
        query = select(ledger).where(ledger.c.sequence > after).order_by(ledger.c.sequence).limit(most)
        with self._state.database.reading() as tx:
            rows: list[Any] = list(tx.execute(query))
            return entry_events(tx, rows)
