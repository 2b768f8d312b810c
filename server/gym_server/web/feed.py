"""The hub's state as events: one thread looks while a page is open, and every page is sent what changed.

What the ledger holds has its sequence as the event's id. A page that comes back with ``Last-Event-ID`` gets the entries
since then from the database, so there is no gap and no double.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from gym_fed.web.events import RELOAD, Event, Feed
from gym_server.federation import Federation
from gym_server.store.away import StoreAway
from gym_server.store.tables import ledger
from gym_server.web.home import snapshot

log = logging.getLogger("gym_server")

_LEAST_SECONDS = 0.25
"""Between two looks: 4 Hz at most."""
_MAX_MISSED = 500
"""Entries that a page which comes back is sent; a page that missed more reads its data again."""


class HubFeed:
    """Publishes what changes at a hub.

    Events: ``snapshot`` (the state of the round, see ``gym_server.web.home``), and from the ledger ``verdict``,
    ``version`` and ``ledger``, each with its entry.
    """

    def __init__(self, fed: Federation) -> None:
        self._fed = fed
        self.feed = Feed(self._since)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="web-feed", daemon=True)
        self._is_blind = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def _since(self, last: int | None) -> Iterator[Event]:
        """How a stream begins: the entries that a page missed, and the state."""
        size = self._size()
        if last is None:
            # With an id: a page that was sent no entry yet resumes from here.
            yield Event("position", {"sequence": size}, size)
        else:
            missed = self._entries(last, _MAX_MISSED + 1)
            if len(missed) > _MAX_MISSED or last > size:  # or the ledger is an older one, from a backup
                yield RELOAD
                return
            yield from missed
        yield Event("snapshot", snapshot(self._fed), None)

    def _watch(self) -> None:
        position, before, seen = self._size(), None, None
        while not self._ended.is_set():
            if not self.feed.has_readers.wait(1.0):
                position, before = max(position, 0), None
                continue
            if self._ended.wait(_LEAST_SECONDS):
                return
            try:
                now = self._stamp()
                if now == seen and now is not None:
                    continue
                seen = now
                for event in self._entries(position, _MAX_MISSED):
                    assert event.id is not None
                    position = event.id
                    self.feed.publish(event)
                state = snapshot(self._fed)
            except (SQLAlchemyError, StoreAway) as error:  # the hub continues; pages keep the last state
                if not self._is_blind:
                    log.warning("the dashboard cannot read the state, and keeps trying: %s", error)
                self._is_blind, seen = True, None
                continue
            self._is_blind = False
            if state != before:
                before = state
                self.feed.publish(Event("snapshot", state))

    def _stamp(self) -> Any:
        """A value that changes when anything was written; None where the database has no such value.

        A connection of SQLite sees by ``data_version`` that another one has written, so the same one must be asked.
        """
        return None

    def _size(self) -> int:
        with self._fed.database.reading() as tx:
            return int(tx.scalar(select(func.max(ledger.c.sequence))) or 0)

    def _entries(self, after: int, most: int) -> list[Event]:
        query = select(ledger).where(ledger.c.sequence > after).order_by(ledger.c.sequence).limit(most)
        with self._fed.database.reading() as tx:
            return [entry_event(row) for row in tx.execute(query)]


_KINDS = {"verdict": "verdict", "version": "version"}


def entry_event(row: Any) -> Event:
    """An entry of the ledger as pages get it."""
    body = json.loads(row.body)
    return Event(
        _KINDS.get(row.kind, "ledger"),
        {"sequence": row.sequence, "kind": row.kind, "body": body},
        row.sequence,
    )
