"""How long tests wait for what must happen: one figure, larger where the machine is busy.

A wait ends as soon as its condition holds. A generous figure costs time only where a test fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def _busy() -> float:
    """1 on an idle machine; runnable processes for each core, of the last minute, where there are more; 8 at most."""
    if given := os.environ.get("GYM_TEST_TIMEOUT_FACTOR"):
        return float(given)
    return min(8.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


BUSY = _busy()

SECONDS = 60.0 * BUSY
"""At most this long for one thing: a process that starts, an answer, a state."""


def until(condition: Callable[[], Found], what: str = "", seconds: float = SECONDS) -> Found:
    """Poll until ``condition()`` is true, and return what it gave.

    Raises:
        AssertionError: It was not, for ``seconds``.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what or condition} did not happen within {seconds:.0f} s"
        time.sleep(0.02)
    return found
