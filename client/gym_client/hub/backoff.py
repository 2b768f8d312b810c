"""Retry calls while a hub is unreachable, with exponential backoff, jitter and a check of the hub's key."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from gym_client.display import Display
from gym_client.hub.transport import HubClient
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import readable_seconds

GONE = (ErrorCode.LEASE_LOST, ErrorCode.STALE, ErrorCode.NOT_FOUND, ErrorCode.REPLAYED)
"""Errors after which the hub no longer needs the task's answer."""
FATAL = (
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.KEY_REVOKED,
    ErrorCode.KEY_LOCKED,
    ErrorCode.SERVER_KEY_CHANGED,
    ErrorCode.SIGNATURE_INVALID,
    ErrorCode.STATE_CORRUPT,
    ErrorCode.LEDGER_FORKED,
    ErrorCode.HUB_RESTORED,
)
"""Errors after which every further task would fail as well."""
TASKS_OWN = (
    ErrorCode.POLICY_REFUSED,
    ErrorCode.TOO_LARGE,
    ErrorCode.HASH_MISMATCH,
    ErrorCode.DELTA_INVALID,
    ErrorCode.UPDATE_REFUSED,
    ErrorCode.TASKS_DIFFER,
    ErrorCode.INTERNAL,
)
"""Errors that concern a single task, so the next one may succeed. Other errors require action by the contributor."""

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0
MAX_INTERNAL = 3
"""Maximum consecutive internal errors of the hub after which calls are still retried, since they may be transient."""
LINE_SECONDS = 60.0
"""Seconds between reports that a hub is still unreachable."""

_PASSING = (
    ErrorCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.BUSY,
    ErrorCode.CLOCK_SKEWED,
    ErrorCode.DISK_FULL,
)

T = TypeVar("T")


class Retry(Protocol):
    """Interface that repeats an action while the hub is unreachable, until the agent stops or the lease is lost."""

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return the result of ``action``."""
        ...


class Backoff:
    """Exponential backoff from 0.5 to 30 seconds; each delay is drawn from the upper half of its range."""

    def __init__(self) -> None:
        self._next = FIRST_SECONDS
        self._internal = 0

    def next_seconds(self) -> float:
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(LONGEST_SECONDS, 2 * self._next)
        return seconds

    def reset(self) -> None:
        """Return to the shortest delay after a reply from the hub."""
        self._next, self._internal = FIRST_SECONDS, 0

    def tolerates(self, error: GymError) -> bool:
        """Return True for the first ``MAX_INTERNAL`` consecutive internal errors of the hub."""
        self._internal += error.code is ErrorCode.INTERNAL
        return error.code is ErrorCode.INTERNAL and self._internal <= MAX_INTERNAL


def is_passing(error: GymError) -> bool:
    """Return True if waiting may help: for connection errors, a busy hub, a full disk or a wrong clock."""
    return error.code in _PASSING


def may_pass(error: GymError) -> bool:
    """Return True if a later call may succeed: for ``is_passing`` errors and internal errors of the hub."""
    return is_passing(error) or error.code is ErrorCode.INTERNAL


class Outage:
    """Reports when a hub becomes unreachable, once a minute while it stays unreachable, and when it is back.

    Args:
        display: Displays the reports.
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._lock = threading.Lock()
        self._since = self._said = -1.0

    def away(self, error: GymError) -> None:
        """Record a failed attempt; thread-safe."""
        with self._lock:
            now = self._clock()
            if self._since < 0:
                self._since = self._said = now
                text = f"{error.message}; retrying (Ctrl-C stops)"
                if error.hint:
                    text = f"{text}; {error.hint}"
            elif now - self._said >= LINE_SECONDS:
                self._said = now
                text = f"still unreachable after {readable_seconds(now - self._since)}: {error.message}"
            else:
                return
            fields = {"error": error.to_dict(), "seconds": round(now - self._since, 1)}
            self._display.report("away", text, **fields)

    def back(self) -> None:
        """Record a reply from the hub; thread-safe."""
        with self._lock:
            if self._since < 0:
                return
            seconds, self._since = self._clock() - self._since, -1.0
            text = f"the server is back after {readable_seconds(seconds)}"
            self._display.report("back", text, seconds=round(seconds, 1))


def retry_while_away(
    stop: threading.Event,
    outage: Outage,
    action: Callable[[], T],
    before_retry: Callable[[], object],
    worth_waiting: Callable[[GymError], bool] = is_passing,
) -> T:
    """Call ``action``, and retry it with backoff while the hub is unreachable, or after a few internal errors.

    Args:
        stop: Event that ends the waiting.
        outage: Reports when the hub is unreachable and when it is back.
        action: Function to call; must be safe to repeat.
        before_retry: Called before every retry.
        worth_waiting: Returns True for errors to retry after.

    Raises:
        GymError: ``INTERRUPTED`` after ``stop``; any error from ``action`` that is not retried.
    """
    backoff = Backoff()
    while True:
        try:
            result = action()
        except GymError as error:
            if not worth_waiting(error) and not backoff.tolerates(error):
                raise
            outage.away(error)
        else:
            outage.back()
            return result
        if stop.wait(backoff.next_seconds()):
            raise GymError(
                ErrorCode.INTERRUPTED,
                "stopped while the server was unreachable",
                "run the same command again",
            )
        before_retry()


def retry_at_known_hub(
    client: HubClient, stop: threading.Event, outage: Outage, action: Callable[[], T]
) -> T:
    """Retry like ``retry_while_away``; also check the hub's pinned key before every retry."""
    return retry_while_away(stop, outage, action, client.check_key)
