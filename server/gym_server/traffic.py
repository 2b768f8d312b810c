"""What a hub's process counts of its calls, for its health: by method and by the code of a refusal."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class HubTraffic:
    """Counts since the start; from any thread. Methods and codes are our own words, so there are few of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self.connections: Callable[[], int | None] = lambda: None
        """How many are open; None where that is not known."""

    def called(self, method: str) -> None:
        """A call of a method of the service came."""
        with self._lock:
            self._calls[method] += 1

    def refused(self, code: str) -> None:
        """A call was refused, or failed."""
        with self._lock:
            self._refusals[code] += 1

    def counts(self) -> dict[str, Any]:
        """``calls`` by method, ``refusals`` by code, ``connections``."""
        with self._lock:
            calls, refusals = dict(self._calls), dict(self._refusals)
        return {"calls": calls, "refusals": refusals, "connections": self.connections()}
