"""Check the clock. The network uses the hub's time, but certificates and file dates use this machine's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, date, datetime

from gym_fed.doctor.check import Check, Finding, Level

# The date of the newest release in CHANGELOG.md (a test compares them). No correct clock shows an earlier date.
RELEASED = date(2026, 11, 24)
_REMEDY = "set the clock, and keep it set with NTP (timedatectl set-ntp true); the time zone does not matter"
_WATCHED_SECONDS = 0.05
_TOLERANCE_SECONDS = 0.05


class Clock(Check):
    """Check for a plausible date, UTC from 1970, and wall time as steady as the monotonic clock."""

    def findings(self) -> Iterator[Finding]:
        now = time.time()
        yield judge_date(datetime.fromtimestamp(now, UTC))
        yield judge_epoch(time.gmtime(0)[:6])
        monotonic = time.monotonic()
        time.sleep(_WATCHED_SECONDS)
        yield judge_pace(time.time() - now, time.monotonic() - monotonic)


def judge_date(now: datetime) -> Finding:
    """Fail for a date before this version was released."""
    seen = now.strftime("%Y-%m-%d %H:%M:%S UTC")
    if now.date() >= RELEASED:
        return Finding("clock: date", Level.OK, seen)
    return Finding(
        "clock: date", Level.FAIL, f"{seen} is before this version's release on {RELEASED}", _REMEDY
    )


def judge_epoch(epoch: tuple[int, ...]) -> Finding:
    """Fail unless second 0 is 1970-01-01 00:00:00 UTC; the ``right/`` time zones break that."""
    if tuple(epoch) == (1970, 1, 1, 0, 0, 0):
        return Finding(
            "clock: zone", Level.OK, f"time zone {time.strftime('%Z') or 'unnamed'} does not affect UTC"
        )
    return Finding("clock: zone", Level.FAIL, f"second 0 is {epoch}, not 1970-01-01", "unset TZ")


def judge_pace(wall_seconds: float, monotonic_seconds: float) -> Finding:
    """Warn if wall time jumps or runs backwards against the monotonic clock."""
    drift = wall_seconds - monotonic_seconds
    if abs(drift) <= _TOLERANCE_SECONDS:
        return Finding("clock: pace", Level.OK, "wall time agrees with the monotonic clock")
    return Finding("clock: pace", Level.WARN, f"wall time jumped by {drift:+.3f} s during the check", _REMEDY)
