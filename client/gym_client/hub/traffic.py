"""Network traffic with a hub: byte counts, measured bandwidth and rate limits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gym_client.display import Display
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.text import readable_bytes, readable_seconds

_POLL_SECONDS, _LEAST_SECONDS = 0.2, 0.001
_SECONDS_A_CALL = 10
"""Maximum seconds of one upload call at the rate limit, so that the hub does not wait long for the call's end."""

_SETTING = "down_bytes_per_second"
_ENOUGH_BYTES = 1_000_000
_UNKNOWN = "unknown, since nothing large was downloaded to this home before"


@dataclass(frozen=True)
class Bytes:
    """Byte counts of soups, tensors and deltas, without message overhead."""

    down: int = 0
    up: int = 0

    def plus(self, other: Bytes) -> Bytes:
        return Bytes(self.down + other.down, self.up + other.up)

    def to_dict(self) -> dict[str, int]:
        """Convert to ``bytes_down`` and ``bytes_up``, as used in receipts and ``--json``."""
        return {"bytes_down": self.down, "bytes_up": self.up}


class Traffic:
    """Counts the bytes exchanged with one hub. The caller must hold the home's lock; counting is thread-safe."""

    def __init__(self, home: Home, server: str) -> None:
        self._home, self._server = home, server
        self._lock = threading.Lock()
        self._unsaved = self._task = Bytes()

    @property
    def task(self) -> Bytes:
        """The bytes of the current task."""
        with self._lock:
            return self._task

    def begin(self) -> None:
        """Start counting the bytes of a new task."""
        with self._lock:
            self._task = Bytes()

    def count_down(self, num_bytes: int) -> None:
        """Count bytes received from the hub."""
        self._count(Bytes(down=num_bytes))

    def count_up(self, num_bytes: int) -> None:
        """Count bytes handed to the network."""
        self._count(Bytes(up=num_bytes))

    def save(self) -> None:
        """Add the new bytes to the home's total."""
        with self._lock:
            if self._unsaved == Bytes():
                return
            all_hubs = _read(self._home)
            total = _total(all_hubs, self._server).plus(self._unsaved)
            all_hubs[self._server] = {"down": total.down, "up": total.up}
            write_atomically(_path(self._home), json.dumps(all_hubs, indent=2, sort_keys=True).encode())
            self._unsaved = Bytes()

    def report(self, display: Display, message_id: str) -> None:
        """Display the bytes of the current task."""
        moved = self.task
        text = f"this task: {readable_bytes(moved.down)} down, {readable_bytes(moved.up)} up"
        display.report("traffic", text, task=message_id, **moved.to_dict())

    def _count(self, more: Bytes) -> None:
        with self._lock:
            self._unsaved, self._task = self._unsaved.plus(more), self._task.plus(more)


def total_of(home: Home, server: str) -> Bytes:
    """Return the total bytes that this home has exchanged with a hub.

    Raises:
        GymError: ``STATE_CORRUPT`` with the name of the file.
    """
    return _total(_read(home), server)


def _path(home: Home) -> Any:
    return home.folder / "traffic.json"


def _read(home: Home) -> dict[str, Any]:
    path = _path(home)
    if not path.exists():
        return {}
    try:
        totals = json.loads(path.read_text(encoding="utf-8"))
        for server in totals:
            _total(totals, server)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"{path} does not contain totals: {error}",
            "delete the file; only totals are lost",
        ) from error
    return dict(totals)


def _total(totals: dict[str, Any], server: str) -> Bytes:
    counts = totals.get(server, {"down": 0, "up": 0})
    return Bytes(int(counts["down"]), int(counts["up"]))


@dataclass(frozen=True)
class Bandwidth:
    """A download bandwidth and how it was measured."""

    bytes_per_second: float
    known_by: str

    def duration(self, num_bytes: int) -> str:
        """Describe how long a download of ``num_bytes`` takes."""
        seconds = readable_seconds(num_bytes / self.bytes_per_second)
        return f"about {seconds} at {readable_bytes(self.bytes_per_second)}/s ({self.known_by})"


class DownloadPace:
    """Measures the bandwidth of a download, and stores the last measurement.

    Args:
        home: The home that stores the measurement.
        limit: Download limit of ``policy.yaml`` in bytes per second; None for no limit.
        clock: Returns monotonic time in seconds.
    """

    def __init__(
        self, home: Home, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home, self._limit, self._clock = home, limit, clock
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def note(self, done: int) -> None:
        """Record the number of bytes received so far."""
        self._last = (done, self._clock())
        self._first = self._first or self._last

    def bandwidth(self) -> Bandwidth | None:
        """Return the bandwidth of this run or of the last download, at most the limit; None if neither is known."""
        measured = self._measured()
        best = None if measured is None else Bandwidth(measured, "just measured")
        if best is None:
            remembered = self._home.settings().get(_SETTING)
            if isinstance(remembered, int | float) and remembered > 0:
                best = Bandwidth(float(remembered), "measured at the last download")
        if self._limit is not None and (best is None or self._limit < best.bytes_per_second):
            return Bandwidth(float(self._limit), "the maximum in policy.yaml")
        return best

    def duration(self, num_bytes: int) -> str:
        """Describe how long a download of ``num_bytes`` takes."""
        bandwidth = self.bandwidth()
        return _UNKNOWN if bandwidth is None else bandwidth.duration(num_bytes)

    def save(self) -> None:
        """Store the measurement in the home."""
        measured = self._measured()
        if measured is not None:
            self._home.remember(**{_SETTING: round(measured)})

    def _measured(self) -> float | None:
        if self._first is None:
            return None
        num_bytes, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return num_bytes / seconds if num_bytes >= _ENOUGH_BYTES and seconds > 0 else None


class TokenBucket:
    """A rate limiter for ``bytes_per_second`` that allows bursts of one second. Thread-safe.

    Args:
        bytes_per_second: The rate; None for no limit.
        clock: Returns monotonic time in seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        bytes_per_second: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._tokens, self._at = float(bytes_per_second or 0), clock()

    def take(self, num_bytes: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Record transferred bytes, then block until the bucket is no longer empty or ``should_stop`` returns True."""
        with self._lock:
            self._fill()
            self._tokens -= num_bytes
        while (wait := self._seconds()) > 0 and not should_stop():
            self._sleep(min(max(wait, _LEAST_SECONDS), _POLL_SECONDS))

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds that a transfer takes at this rate."""
        rate = self.bytes_per_second
        return 0.0 if rate is None else num_bytes / rate

    def chunk(self, most: int) -> int:
        """Return the number of bytes to send at a time: those of one second, at most ``most``."""
        return most if self.bytes_per_second is None else min(most, self.bytes_per_second)

    def span(self, most: int) -> int:
        """Return the number of bytes for one upload call, at most ``most``."""
        return most if self.bytes_per_second is None else min(most, _SECONDS_A_CALL * self.bytes_per_second)

    def _seconds(self) -> float:
        """Return the seconds until the bucket is no longer empty."""
        with self._lock:
            self._fill()
            rate = self.bytes_per_second
            return 0.0 if rate is None or self._tokens >= 0 else -self._tokens / rate

    def _fill(self) -> None:
        now, rate = self._clock(), self.bytes_per_second
        if rate is None:
            self._tokens = 0.0
        else:
            self._tokens = min(float(rate), self._tokens + (now - self._at) * rate)
        self._at = now


class Rates:
    """The rate limits of one hub in both directions."""

    def __init__(self) -> None:
        self.up, self.down = TokenBucket(), TokenBucket()

    def limit(self, up: int | None, down: int | None) -> None:
        """Set the limits in bytes per second; None for no limit."""
        self.up.bytes_per_second, self.down.bytes_per_second = up, down
