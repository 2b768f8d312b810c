"""How often each file was used lately, those that are not in memory any more too. Not for several threads at once.

Counts are halved every so many uses, as TinyLFU ages its own (Einziger, Friedman and Manes 2017, section 3.3): what was
popular once makes room in the end. They are halved every few minutes, too: on a server of few requests, what one caller
used often for a while would keep its room for days.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_USES_A_FILE = 10
"""Between two halvings, for each file that is in memory."""
_FEWEST_USES = 1000
HALVED_SECONDS = 300.0
"""2000 uses, the most that are ever counted of a file, are none within an hour."""


class UseCounts:
    """Aged counts by digest.

    Args:
        now: Seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: dict[str, float] = {}
        self._since = 0
        self._halved_at = now()

    def __getitem__(self, digest: str) -> float:
        return self._counts.get(digest, 0.0)

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, digest: str, in_memory: int) -> None:
        """One use; ``in_memory`` files are there now."""
        if periods := int((self._now() - self._halved_at) / HALVED_SECONDS):
            self._halved_at += periods * HALVED_SECONDS
            self._halve(periods)
        self._counts[digest] = self[digest] + 1
        self._since += 1
        if self._since >= max(_FEWEST_USES, _USES_A_FILE * in_memory):
            self._halve(1)

    def _halve(self, times: int) -> None:
        """What was used less than once is forgotten."""
        self._since = 0
        part = 0.5 ** min(times, 64)
        self._counts = {one: count * part for one, count in self._counts.items() if count * part >= 0.5}
