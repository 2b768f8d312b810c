"""Counters of a hub's calls by method and of refusals by code, for its health page."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class HubTraffic:
    """Counts since the start. Thread-safe. Only known methods and codes are counted, so memory is bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self.connections: Callable[[], int | None] = lambda: None
        """Returns the number of open connections; None if unknown."""

    def called(self, method: str) -> None:
        """Count a call of a method."""
        with self._lock:
            self._calls[method] += 1

    def refused(self, code: str) -> None:
        """Count a call that was refused or failed."""
        with self._lock:
            self._refusals[code] += 1

    def counts(self) -> dict[str, Any]:
        """Return ``calls`` by method, ``refusals`` by code, and ``connections``."""
        with self._lock:
            calls, refusals = dict(self._calls), dict(self._refusals)
        return {"calls": calls, "refusals": refusals, "connections": self.connections()}
