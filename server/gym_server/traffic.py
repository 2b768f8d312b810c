"""Counters of a hub's calls by method and of refusals by code, for its health page."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class HubTraffic:
    """Counters since the hub started. Thread-safe. Only known methods and codes are counted, so memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._seeding: Counter[str] = Counter()
        self._downloaded = 0
        self.connections: Callable[[], int | None] = lambda: None
        """Function that returns the number of open connections; None if unknown."""
        self.seeders: Callable[[], int] = lambda: 0
        """Function that returns the number of contributors who serve objects to others."""

    def called(self, method: str) -> None:
        """Count a call of a method."""
        with self._lock:
            self._calls[method] += 1

    def refused(self, code: str) -> None:
        """Count a call that was refused or failed."""
        with self._lock:
            self._refusals[code] += 1

    def note_download(self, num_bytes: int) -> None:
        """Count bytes of objects that were sent."""
        with self._lock:
            self._downloaded += num_bytes

    def note_ticket(self) -> None:
        """Count a ticket for a download from a contributor."""
        with self._lock:
            self._seeding["tickets"] += 1

    def note_failed_seeder(self) -> None:
        """Count a report that a contributor did not deliver an object."""
        with self._lock:
            self._seeding["failures"] += 1

    def counts(self) -> dict[str, Any]:
        """Return ``calls`` by method, ``refusals`` by code, ``connections``, ``download_bytes``, and ``seeding``."""
        with self._lock:
            calls, refusals, seeding = dict(self._calls), dict(self._refusals), Counter(self._seeding)
            downloaded = self._downloaded
        return {
            "calls": calls,
            "refusals": refusals,
            "connections": self.connections(),
            "download_bytes": downloaded,
            "seeding": {
                "seeders": self.seeders(),
                "tickets": seeding["tickets"],
                "failures": seeding["failures"],
            },
        }
