"""The hub's clock: seconds since 1970 that a step of the machine's own clock does not move.

Leases, deadlines, sessions and signed times are measured by it. While a hub runs it advances with the monotonic clock.
It begins at the machine's time; where a round is under way it continues from the last trace of the hub's activity, so
that the time for which a hub was down counts against nobody. Commands in other processes read the difference to the
machine's clock from the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection, func, select

from gym_fed.wire.limits import KEEPALIVE_SECONDS
from gym_server.store.database import Database
from gym_server.store.tables import messages, nodes, rounds, settings, updates

STEP_SECONDS = 2.0
"""A machine's clock that moves by more against the monotonic one was set."""

_SETTING = "clock_offset"
_UNDER_WAY = ("collecting", "merging")


class HubClock:
    """Unix seconds by the hub's count.

    Args:
        database: Keeps the difference to the machine's clock.
        wall: The machine's clock.
        steady: A clock that is never set; tests bring their own.
    """

    def __init__(
        self,
        database: Database,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self.wall, self.steady = database, wall, steady
        self._lock = threading.Lock()
        self._began: float | None = None
        """Time of the hub at second 0 of ``steady``; None where no hub runs in this process."""
        self._away = 0.0
        self._offset = self._stored()

    def now(self) -> float:
        """The hub's time."""
        if self._began is not None:
            return self.steady() + self._began
        if self._database.read_only:
            self._offset = self._stored()  # a dashboard stays open while the hub's machine is set
        return self.wall() + self._offset

    def least(self) -> float:
        """The least time that it can be now, for deciding what is old enough to be deleted.

        While a round is under way that is no later than the last trace of it: a machine's clock that was set forward,
        even while no hub ran, ages nothing of an open round.
        """
        with self._database.reading() as tx:
            active = _last_activity(tx)
        return self.now() if active is None else min(self.now(), active)

    def start(self) -> None:
        """Run from here on, as a hub does that holds its lock."""
        wall = self.wall()
        with self._database.transaction() as tx:
            last = _last_activity(tx)
            now = wall if last is None else last
            self._away = max(0.0, wall - now)
            gone = now + KEEPALIVE_SECONDS
            tx.execute(nodes.update().where(nodes.c.connected_until > gone).values(connected_until=now))
        self._began = now - self.steady()
        self._store(now - wall)

    def catch_up(self) -> None:
        """Between two rounds: add the time for which the hub was away when it began."""
        with self._lock:
            if self._began is not None and self._away:
                self._began, self._away = self._began + self._away, 0.0
                self._store(self.now() - self.wall())

    def keep(self) -> float:
        """Look at the machine's clock, every few seconds; returns by how much it was set since the last time.

        Positive: forward.
        """
        with self._lock:
            offset = self.now() - self.wall()
            step = self._offset - offset
            if abs(step) <= STEP_SECONDS:
                return 0.0
            self._store(offset)
            return step

    def _stored(self) -> float:
        with self._database.reading() as tx:
            return float(tx.scalar(select(settings.c.value).where(settings.c.key == _SETTING)) or 0.0)

    def _store(self, offset: float) -> None:
        self._offset = offset
        self._database.set(_SETTING, repr(offset))


def _last_activity(tx: Connection) -> float | None:
    """About when a hub last did something for the round that is under way; None without such a round."""
    newest = select(rounds.c.state, rounds.c.opened_at).order_by(rounds.c.server_round.desc()).limit(1)
    row = tx.execute(newest).first()
    if row is None or row.state not in _UNDER_WAY:
        return None
    traces = (
        select(func.max(messages.c.created_at)),
        select(func.max(messages.c.replied_at)),
        select(func.max(updates.c.received_at)),
        select(func.max(nodes.c.connected_until) - KEEPALIVE_SECONDS),
    )
    return max(float(row.opened_at), *(float(tx.scalar(trace) or 0.0) for trace in traces))
