"""Warnings about the clock of the hub's machine: it was set while the hub runs, or most contributors have another."""

from __future__ import annotations

import logging

from gym_fed.text import readable_seconds
from gym_server.federation import Federation

log = logging.getLogger("gym_server")

_TOLERANCE_SECONDS = 60.0
_LEAST_CLOCKS = 3
"""Contributors whose clocks are compared with the hub's; fewer say little about who is right."""


class ClockWatch:
    """Looks every few seconds; each difference is logged once."""

    def __init__(self, fed: Federation) -> None:
        self._fed = fed
        self._reported = 0.0
        self._slept = 0.0

    def look(self) -> None:
        """Look once."""
        step = self._fed.clock.keep()
        if step:
            log.warning(
                "this machine's clock was set %s %s; rounds, leases and sessions go on by the monotonic clock",
                readable_seconds(abs(step)),
                "forward" if step > 0 else "back",
            )
        asleep, self._slept = self._fed.clock.slept - self._slept, self._fed.clock.slept
        if asleep > 0:
            log.warning(
                "this machine slept for %s; that counts against no round, lease or session",
                readable_seconds(asleep),
            )
        ahead, count = self._fed.contributor_clocks.median()
        # Of this machine's clock, against the contributors'.
        wrong = self._fed.clock.wall() - self._fed.clock.now() - ahead
        if count < _LEAST_CLOCKS or abs(wrong) <= _TOLERANCE_SECONDS:
            self._reported = 0.0
        elif abs(wrong - self._reported) > _TOLERANCE_SECONDS:
            self._reported = wrong
            log.warning(
                "this machine's clock is %s %s those of %d contributors (their median); set it: the hub's is the "
                "wrong one",
                readable_seconds(abs(wrong)),
                "ahead of" if wrong > 0 else "behind",
                count,
            )
