"""A full disk under the contributor's home: work waits for room, with its lease kept, and continues."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gym_client.display import Display
from gym_client.hub.backoff import LINE_SECONDS
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import system_error
from gym_fed.core.text import readable_bytes

_POLL_SECONDS = 1.0
_RETRY_SECONDS = 300.0
"""A quota has room again without any change of the disk's free bytes."""

T = TypeVar("T")


class DiskRoom:
    """Repeats what a full disk broke off, once there is more room than when it did.

    Args:
        home: On the disk that is watched.
        display: Prints that work waits, and that it goes on.
        stop: Ends the waiting.
        clock: Seconds, rising.
    """

    def __init__(
        self, home: Home, display: Display, stop: threading.Event, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home, self._display, self._stop, self._clock = home, display, stop, clock

    def needed(self, action: Callable[[], T], lost: Callable[[], GymError | None] = lambda: None) -> T:
        """Call ``action``, which must be safe to repeat, until the disk has room for it.

        Args:
            action: Raises ``DISK_FULL``, or the system's error, where there is none.
            lost: Why waiting has become pointless, such as a lease that was lost; None while it has not.

        Raises:
            GymError: What ``lost`` returned; ``INTERRUPTED`` after ``stop``; any other error of ``action``.
        """
        waited = False
        while True:
            try:
                found = action()
            except Exception as error:
                full = system_error(error)
                if full is None or full.code is not ErrorCode.DISK_FULL:
                    raise
            else:
                if waited:
                    self._display.report("room", "there is room on the disk again; work goes on")
                return found
            # Outside of the except block: what the failed try held, such as a lock, is free by now.
            self._wait(full, lost)
            waited = True

    def _wait(self, full: GymError, lost: Callable[[], GymError | None]) -> None:
        disk = shutil.disk_usage(self._home.folder)
        more = max(64 << 10, min(64 << 20, disk.total // 50))
        began = said = self._clock()
        self._report(full, disk.free, more)
        self._display.busy("waiting for room on the disk")
        while shutil.disk_usage(self._home.folder).free < disk.free + more:
            if self._stop.wait(_POLL_SECONDS):
                raise GymError(ErrorCode.INTERRUPTED, f"stopped: {full.message}", full.hint)
            if (why := lost()) is not None:
                raise why
            now = self._clock()
            if now - began >= _RETRY_SECONDS:
                return
            if now - said >= LINE_SECONDS:
                said = now
                self._report(full, shutil.disk_usage(self._home.folder).free, more)

    def _report(self, full: GymError, free_bytes: int, more_bytes: int) -> None:
        text = (
            f"disk-full: {full.message}: {readable_bytes(free_bytes)} are free for {self._home.folder}; work waits for "
            f"{readable_bytes(more_bytes)} more and then goes on (Ctrl-C ends)"
        )
        self._display.report("disk-full", text, error=full.to_dict(), free_bytes=free_bytes)
