"""Limits on bytes per second, as token buckets: what was moved is paid for by waiting before the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_POLL_SECONDS, _LEAST_SECONDS = 0.2, 0.001
_SECONDS_A_CALL = 10
"""What one upload call moves at most, so that a hub never waits long for its end."""


class TokenBucket:
    """Lets ``bytes_per_second`` through, a second's worth at once. Safe from any thread.

    Args:
        bytes_per_second: None lets everything through.
        clock: Seconds, rising.
        sleep: Waits so many seconds.
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
        """Pay for bytes that were moved: returns when the bucket is no longer empty, or at ``should_stop``."""
        with self._lock:
            self._fill()
            self._tokens -= num_bytes
        while (wait := self._seconds()) > 0 and not should_stop():
            self._sleep(min(max(wait, _LEAST_SECONDS), _POLL_SECONDS))

    def seconds(self, num_bytes: int) -> float:
        """What so many bytes take at this rate."""
        rate = self.bytes_per_second
        return 0.0 if rate is None else num_bytes / rate

    def chunk(self, most: int) -> int:
        """Bytes to hand over at once: a second's worth, ``most`` at most."""
        return most if self.bytes_per_second is None else min(most, self.bytes_per_second)

    def span(self, most: int) -> int:
        """Bytes of one upload call, ``most`` at most."""
        return most if self.bytes_per_second is None else min(most, _SECONDS_A_CALL * self.bytes_per_second)

    def _seconds(self) -> float:
        """Until the bucket is no longer empty."""
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
    """The two directions of one hub."""

    def __init__(self) -> None:
        self.up, self.down = TokenBucket(), TokenBucket()

    def limit(self, up: int | None, down: int | None) -> None:
        """Bytes per second from now on; None for no limit."""
        self.up.bytes_per_second, self.down.bytes_per_second = up, down
