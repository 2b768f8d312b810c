"""How fast bytes come down: measured while a base is fetched, remembered in the home, and never above the limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gym_client.identity.home import Home
from gym_fed.core.text import readable_bytes, readable_seconds

_SETTING = "down_bytes_per_second"
_ENOUGH_BYTES = 1_000_000
_UNKNOWN = "how long that takes is not known: nothing large was fetched here before"


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that come down, and how that is known."""

    bytes_per_second: float
    known_by: str

    def duration(self, num_bytes: int) -> str:
        """How long so many bytes take."""
        seconds = readable_seconds(num_bytes / self.bytes_per_second)
        return f"about {seconds} at {readable_bytes(self.bytes_per_second)}/s, {self.known_by}"


class DownloadPace:
    """Measures a download, and knows what the last one was.

    Args:
        home: Keeps the measurement.
        limit: Of ``policy.yaml``; None for none.
        clock: Seconds, rising.
    """

    def __init__(
        self, home: Home, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home, self._limit, self._clock = home, limit, clock
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def note(self, done: int) -> None:
        """So many bytes are here now."""
        self._last = (done, self._clock())
        self._first = self._first or self._last

    def bandwidth(self) -> Bandwidth | None:
        """As measured in this run, else the last time, else None; the limit where that is lower."""
        measured = self._measured()
        found = None if measured is None else Bandwidth(measured, "measured just now")
        if found is None:
            remembered = self._home.settings().get(_SETTING)
            if isinstance(remembered, int | float) and remembered > 0:
                found = Bandwidth(float(remembered), "measured at the last download")
        if self._limit is not None and (found is None or self._limit < found.bytes_per_second):
            return Bandwidth(float(self._limit), "the most that policy.yaml allows")
        return found

    def duration(self, num_bytes: int) -> str:
        """How long so many bytes take, in words."""
        found = self.bandwidth()
        return _UNKNOWN if found is None else found.duration(num_bytes)

    def save(self) -> None:
        """Remember what was measured."""
        measured = self._measured()
        if measured is not None:
            self._home.remember(**{_SETTING: round(measured)})

    def _measured(self) -> float | None:
        if self._first is None:
            return None
        num_bytes, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return num_bytes / seconds if num_bytes >= _ENOUGH_BYTES and seconds > 0 else None
