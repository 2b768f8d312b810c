"""What the log says of refused and failed calls: the first at once, the rest as a count a minute.

Nobody fills the disk by being refused: a minute has at most ``MAX_LINES`` lines of this kind, whatever comes in.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from gym_fed.errors import GymError

log = logging.getLogger("gym_server")

MINUTE_SECONDS = 60.0
MAX_LINES = 100
"""Kinds of refusal that are counted separately in one minute; what comes beyond them is counted together."""
_REST = ("others", "", "")


class Refusals:
    """Counts by caller, method and code. For the event loop's thread."""

    def __init__(self, minute_seconds: float = MINUTE_SECONDS) -> None:
        self._minute_seconds = minute_seconds
        self._more: Counter[tuple[str, str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, who: str, method: str, error: GymError, level: int = logging.INFO) -> None:
        """A call was refused.

        Args:
            who: The account, or the address of who is not logged in.
            method: That was called.
            error: The refusal.
            level: Of the log.
        """
        if self._is_first((who, method, error.code.value)):
            log.log(level, "%s refused to %s: %s: %s", method, who, error.code.value, error.message)

    def failed(self, method: str, error: Exception) -> None:
        """A call failed by a defect of ours; the first of a kind is logged with its trace."""
        if self._is_first(("", method, type(error).__name__)):
            log.error("%s failed", method, exc_info=error)

    def _is_first(self, kind: tuple[str, str, str]) -> bool:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._minute_seconds, self._summarise)
        if kind not in self._more and len(self._more) < MAX_LINES:
            self._more[kind] = 0
            return True
        self._more[kind if kind in self._more else _REST] += 1
        return False

    def _summarise(self) -> None:
        self._timer = None
        told, self._more = self._more, Counter()
        for (who, method, code), count in told.items():
            if count and method:
                log.info(
                    "%s: %d more times %s to %s in the last minute", method, count, code, who or "callers"
                )
            elif count:
                log.info("%d more calls were refused in the last minute, of other callers", count)
