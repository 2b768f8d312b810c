"""The hub's clock in Unix seconds, which is unaffected when the machine's clock is set.

It times leases, deadlines, sessions and signed statements. While a hub runs, it advances with a system clock that
cannot be set. It starts at the machine's time or, during a round, at the hub's last recorded activity. Downtime and
sleep therefore do not shorten a round; they are added between two rounds. Commands in other processes read the offset
from the machine's clock from the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection, func, select

from gym_fed.core.portable import steady_seconds
from gym_fed.trust.wire.limits import KEEPALIVE_SECONDS
from gym_server.store.database import Database
from gym_server.store.tables import messages, nodes, rounds, settings, updates

STEP_SECONDS = 2.0
"""The machine's clock counts as set if it moved by more than this relative to the monotonic clock, in seconds."""

_SETTING = "clock_offset"
_UNDER_WAY = ("collecting", "merging")


class HubClock:
    """The hub's time in Unix seconds.

    Args:
        database: Database that stores the offset from the machine's clock.
        wall: The machine's clock.
        steady: Clock that cannot be set and advances while the machine sleeps.
        awake: Clock that cannot be set and stops while the machine sleeps.
    """

    def __init__(
        self,
        database: Database,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_seconds,
        awake: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self.wall, self.steady, self.awake = database, wall, steady, awake
        self._lock = threading.Lock()
        self._storing = threading.Lock()
        """Lock held during writes to the database, instead of ``_lock``, which ``now`` may need meanwhile."""
        self._began: float | None = None
        """Time of the hub's clock when ``steady`` was 0; None if no hub runs in this process."""
        self._away = 0.0
        """Seconds of downtime and sleep that have not been added yet."""
        self.slept = 0.0
        """Seconds for which the machine slept since ``start``."""
        self._ahead = 0.0
        """Value of ``steady`` minus ``awake`` at the start, in seconds."""
        self._unstored = 0.0
        """Seconds of sleep that are not yet in the stored offset from the machine's clock."""
        self._offset = self._stored()

    def now(self) -> float:
        """Return the hub's time in Unix seconds."""
        if self._began is not None:
            self._notice_sleep()
            return self.steady() + self._began
        if self._database.read_only:
            self._offset = self._stored()  # the stored offset may change while a dashboard is open
        return self.wall() + self._offset

    def earliest_now(self) -> float:
        """Return the earliest possible current time, for deciding which files are old enough to be deleted.

        During a round it is at most the time of the hub's last recorded activity. Files of an open round therefore do
        not age if the machine's clock is set forward, even while no hub runs.
        """
        with self._database.reading() as tx:
            active = _last_activity(tx)
        return self.now() if active is None else min(self.now(), active)

    def start(self) -> None:
        """Start the clock for a hub that runs in this process and holds its lock."""
        wall = self.wall()
        with self._database.transaction() as tx:
            last = _last_activity(tx)
            now = wall if last is None else last
            self._away = max(0.0, wall - now)
            gone = now + KEEPALIVE_SECONDS
            tx.execute(nodes.update().where(nodes.c.connected_until > gone).values(connected_until=now))
        self._ahead, self.slept = self.steady() - self.awake(), 0.0
        self._began = now - self.steady()
        self._offset, self._unstored = now - wall, 0.0
        self._store()

    def catch_up(self) -> None:
        """Add the time for which the hub was down or its machine slept; call it between two rounds."""
        self._notice_sleep()
        with self._lock:
            if self._began is None or not self._away:
                return
            self._began, self._away = self._began + self._away, 0.0
            self._measure()
        self._store()

    def keep(self) -> float:
        """Compare with the machine's clock; call it every few seconds.

        Returns:
            Seconds by which the machine's clock was set since the last call, positive if forward.
        """
        self._notice_sleep()
        if self._away and not self._has_round():
            self.catch_up()
        with self._lock:
            if self._began is None:
                return 0.0
            offset = self.steady() + self._began - self.wall()
            step = self._offset - offset - self._unstored
            is_set = abs(step) > STEP_SECONDS
            if not is_set and not self._unstored:
                return 0.0
            self._measure()
        self._store()
        return step if is_set else 0.0

    def _notice_sleep(self) -> None:
        """Exclude the time for which the machine slept, until ``catch_up`` adds it."""
        if self._began is None or self._slept_now() <= STEP_SECONDS:
            return
        with self._lock:
            new = self._slept_now()
            if new > STEP_SECONDS:
                self._began -= new
                self.slept += new
                self._away += new
                self._unstored += new

    def _slept_now(self) -> float:
        """Return the seconds of sleep that have not been noticed yet."""
        return self.steady() - self.awake() - self._ahead - self.slept

    def _has_round(self) -> bool:
        with self._database.reading() as tx:
            return _last_activity(tx) is not None

    def _stored(self) -> float:
        with self._database.reading() as tx:
            return float(tx.scalar(select(settings.c.value).where(settings.c.key == _SETTING)) or 0.0)

    def _measure(self) -> None:
        """Measure the offset from the machine's clock; the caller holds the lock."""
        assert self._began is not None
        self._offset, self._unstored = self.steady() + self._began - self.wall(), 0.0

    def _store(self) -> None:
        with self._storing:
            self._database.set(_SETTING, repr(self._offset))


def _last_activity(tx: Connection) -> float | None:
    """Return the approximate time of the hub's last activity in the current round; None if no round is in progress."""
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
