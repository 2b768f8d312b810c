"""The hub's time on a contributor's machine, and detection of wrong clocks.

``Status`` returns the hub's time, and from then on this machine's monotonic clock advances it. Signatures contain this
time, so a wrong local clock, or one that is set during a round, has no effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from gym_client.display import Display
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.portable import steady_seconds
from gym_fed.core.text import readable_seconds
from gym_fed.trust.wire.v1 import hub_pb2 as pb

TOLERANCE_SECONDS = 60.0
"""Maximum difference in seconds between clocks that are considered equal."""

_END_OF_TIME = 253_402_300_800.0
"""The year 10000 in Unix seconds, which ``datetime`` cannot represent."""

_FEW_CLOCKS = 2
"""Minimum number of other contributors' clocks that are needed to decide which side is wrong."""


@dataclass(frozen=True)
class Clocks:
    """Readings of the clocks at one moment, in Unix seconds.

    Attributes:
        here: Time of this machine.
        hub: The hub's time, which is unaffected by changes to the clock of its machine.
        hub_machine: Time of the hub's machine.
        others: Median time of the other contributors' machines; None if too few have reported theirs.
        set_by: Seconds by which this machine's clock was changed since it last agreed with the hub machine's; negative
            if it was set back, 0 if they never agreed in this process.
    """

    here: float
    hub: float
    hub_machine: float
    others: float | None = None
    set_by: float = 0.0

    @property
    def ahead(self) -> float:
        """Seconds by which this machine's clock is ahead of that of the hub's machine."""
        return self.here - self.hub_machine

    @property
    def differ(self) -> bool:
        """True if the difference is larger than latency and drift can explain."""
        return abs(self.ahead) > TOLERANCE_SECONDS

    def note(self, earliest: float) -> str:
        """Describe how the clocks differ and which side is wrong; empty if they agree.

        Args:
            earliest: Lower bound of the correct time, in Unix seconds.
        """
        if not self.differ:
            return ""
        side = "ahead of" if self.ahead > 0 else "behind"
        text = (
            f"this machine's clock ({_shown(self.here)}) is {readable_seconds(abs(self.ahead))} {side} the hub's "
            f"({_shown(self.hub_machine)}); "
        )
        return f"{text}{self._verdict(earliest)}. Work continues with the hub's time"

    def _verdict(self, earliest: float) -> str:
        ours = "set this machine's clock"
        hubs = "the coordinator should set the hub's clock"
        if self.here < earliest:
            return f"{ours}: it shows a time before this version of gym-fed was released"
        if self.hub_machine < earliest:
            return f"{hubs}: it shows a time before this version of gym-fed was released"
        if abs(self.hub_machine - self.hub) > TOLERANCE_SECONDS >= abs(self.here - self.hub):
            return f"{hubs}: it was set while the hub ran"
        if abs(self.set_by) > TOLERANCE_SECONDS >= abs(self.hub_machine - self.hub):
            return f"{ours}: it was set while gym-client ran"
        if self.others is not None and abs(self.others - self.here) <= TOLERANCE_SECONDS:
            return f"{hubs}: the other contributors' clocks agree with this machine's"
        if self.others is not None and abs(self.others - self.hub_machine) <= TOLERANCE_SECONDS:
            return f"{ours}: the other contributors' clocks agree with the hub's"
        return "one of the two clocks is wrong"


class ClockReport:
    """Reports that the clocks differ: once, and again whenever the difference changes."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._reported = 0.0

    def update(self, clocks: Clocks | None) -> None:
        """Report the clocks from the last ``Status`` if their difference is new or has changed."""
        if clocks is None or not clocks.differ:
            self._reported = 0.0
        elif abs(clocks.ahead - self._reported) > TOLERANCE_SECONDS:
            self._reported = clocks.ahead
            self._display.report("clock", clocks.note(_earliest()), ahead_seconds=round(clocks.ahead))


class HubTime:
    """The hub's time, measured with ``Status``.

    Args:
        wall: Returns this machine's time in Unix seconds.
        steady: Returns the time in seconds of a clock that nobody can set and that advances during sleep.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady_seconds
    ) -> None:
        self._wall, self._steady = wall, steady
        self._measured: tuple[float, float] | None = None
        """The measured hub time, and the time of ``steady`` at that moment."""
        self._agreed: float | None = None
        """``wall`` minus ``steady`` when both machines' clocks last agreed."""
        self.clocks: Clocks | None = None

    @property
    def is_known(self) -> bool:
        """True if the hub's time has been measured."""
        return self._measured is not None

    def now(self) -> float:
        """Return the hub's time; before the first measurement, this machine's time."""
        if self._measured is None:
            return self._wall()
        hub, steady = self._measured
        return hub + self._steady() - steady

    def measure(self, call: Callable[[], pb.StatusReply]) -> pb.StatusReply:
        """Make the call and take the hub's time from its reply, assuming that it was read halfway through the call."""
        began = self._steady()
        reply = call()
        half = (self._steady() - began) / 2
        times = (reply.hub_seconds, reply.clock_seconds, reply.contributors_ahead_seconds)
        if not all(math.isfinite(seconds) and abs(seconds) < _END_OF_TIME for seconds in times):
            raise GymError(
                ErrorCode.INTERNAL, "the hub sends an invalid time", "report it to the coordinator"
            )
        if reply.hub_seconds:  # 0 if the hub does not report its time
            self._measured = (reply.hub_seconds + half, self._steady())
            known = reply.num_clocks >= _FEW_CLOCKS
            here, steady = self._wall(), self._steady()
            self.clocks = Clocks(
                here=here,
                hub=reply.hub_seconds + half,
                hub_machine=reply.clock_seconds + half,
                others=reply.hub_seconds + half + reply.contributors_ahead_seconds if known else None,
                set_by=0.0 if self._agreed is None else here - steady - self._agreed,
            )
            if not self.clocks.differ:
                self._agreed = here - steady
        return reply


def _earliest() -> float:
    """Return the release date of this version; no correct clock can show an earlier time."""
    from gym_fed.doctor.checks.clock import RELEASED

    return datetime(RELEASED.year, RELEASED.month, RELEASED.day, tzinfo=UTC).timestamp()


def _shown(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M UTC}"
    except (ValueError, OverflowError, OSError):
        return "a date out of range"
