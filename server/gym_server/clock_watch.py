"""Warnings if the clock of the hub's machine was set, or differs from most contributors' clocks."""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections import OrderedDict

from gym_fed.core.text import readable_seconds
from gym_server.clock import HubClock

log = logging.getLogger("gym_server")

_TOLERANCE_SECONDS = 60.0
_LEAST_CLOCKS = 3
"""Minimum number of contributors' clocks to compare with the hub's; fewer do not show which clock is wrong."""
MAX_CLOCKS = 1000
"""Maximum number of stored clocks; those of the most recent logins are kept."""


class ContributorClocks:
    """The difference between each contributor's clock and the hub's, in seconds, with one value per account."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: OrderedDict[str, float] = OrderedDict()

    def note(self, contributor: str, clock_seconds: float, hub_seconds: float) -> None:
        """Record a contributor's clock.

        Args:
            contributor: The contributor's id.
            clock_seconds: Its Unix time; ignored if it is 0 (from clients that report none) or not finite.
            hub_seconds: The hub's time at that moment.
        """
        if not math.isfinite(clock_seconds) or clock_seconds == 0:
            return
        with self._lock:
            self._ahead[contributor] = clock_seconds - hub_seconds
            self._ahead.move_to_end(contributor)
            if len(self._ahead) > MAX_CLOCKS:
                self._ahead.popitem(last=False)

    def median(self) -> tuple[float, int]:
        """Return the median of seconds by which the clocks are ahead of the hub's, and the number of clocks."""
        with self._lock:
            ahead = list(self._ahead.values())
        return (statistics.median(ahead) if ahead else 0.0), len(ahead)


class ClockWatch:
    """Compares the clocks every few seconds; logs each difference once."""

    def __init__(self, clock: HubClock, contributor_clocks: ContributorClocks) -> None:
        self._clock, self._contributor_clocks = clock, contributor_clocks
        self._reported = 0.0
        self._slept = 0.0

    def check(self) -> None:
        """Compare the clocks once."""
        step = self._clock.keep()
        if step:
            log.warning(
                "this machine's clock was set %s %s; rounds, leases and sessions are not affected",
                readable_seconds(abs(step)),
                "forward" if step > 0 else "back",
            )
        asleep, self._slept = self._clock.slept - self._slept, self._clock.slept
        if asleep > 0:
            log.warning(
                "this machine slept for %s; rounds, leases and sessions are extended by that time",
                readable_seconds(asleep),
            )
        ahead, count = self._contributor_clocks.median()
        # difference between this machine's clock and the contributors' clocks
        wrong = self._clock.wall() - self._clock.now() - ahead
        if count < _LEAST_CLOCKS or abs(wrong) <= _TOLERANCE_SECONDS:
            self._reported = 0.0
        elif abs(wrong - self._reported) > _TOLERANCE_SECONDS:
            self._reported = wrong
            log.warning(
                "this machine's clock is %s %s the median of %d contributors' clocks, so it is probably wrong; set it",
                readable_seconds(abs(wrong)),
                "ahead of" if wrong > 0 else "behind",
                count,
            )
