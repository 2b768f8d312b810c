"""What contributors' clocks show, as they said when they logged in: witnesses to whose clock is wrong."""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict

MAX_CLOCKS = 1000
"""Of those that logged in last."""


class ContributorClocks:
    """How far each contributor's clock is ahead of the hub's time, in seconds; one figure an account."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: OrderedDict[str, float] = OrderedDict()

    def note(self, contributor: str, clock_seconds: float, hub_seconds: float) -> None:
        """Keep what a contributor's clock showed; 0, as of a client that says nothing, and no number count for nothing.

        Args:
            contributor: Whose.
            clock_seconds: What it showed, Unix seconds.
            hub_seconds: The hub's time then.
        """
        if not math.isfinite(clock_seconds) or clock_seconds == 0:
            return
        with self._lock:
            self._ahead[contributor] = clock_seconds - hub_seconds
            self._ahead.move_to_end(contributor)
            if len(self._ahead) > MAX_CLOCKS:
                self._ahead.popitem(last=False)

    def median(self) -> tuple[float, int]:
        """Median of how far they are ahead, in seconds, and of how many contributors."""
        with self._lock:
            found = list(self._ahead.values())
        return (statistics.median(found) if found else 0.0), len(found)
