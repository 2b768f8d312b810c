"""Waiting for a hub that is away: exponential backoff with jitter, the key checked again at every try."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from gym_client.transport import HubClient
from gym_fed.errors import ErrorCode, GymError

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 30.0
_PASSING = (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)

T = TypeVar("T")


class Backoff:
    """Delays that double from half a second to thirty; each is drawn from its upper half."""

    def __init__(self) -> None:
        self._next = FIRST_SECONDS

    def next_seconds(self) -> float:
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(LONGEST_SECONDS, 2 * self._next)
        return seconds

    def reset(self) -> None:
        """The hub answered: begin again at the shortest delay."""
        self._next = FIRST_SECONDS


def is_passing(error: GymError) -> bool:
    """Whether waiting may help: the line or the hub is down."""
    return error.code in _PASSING


def patiently(
    client: HubClient,
    stop: threading.Event,
    tell: Callable[[GymError, float], None],
    action: Callable[[], T],
) -> T:
    """Do something over the network, again and again while the hub is away.

    Args:
        client: The hub; its key is checked before every further try.
        stop: Set by a signal; ends the waiting.
        tell: Called with the error and the seconds until the next try.
        action: Must be safe to repeat.

    Raises:
        GymError: ``INTERRUPTED`` after ``stop``; whatever ``action`` raises that waiting does not help.
    """
    backoff = Backoff()
    while True:
        try:
            return action()
        except GymError as error:
            if not is_passing(error):
                raise
            seconds = backoff.next_seconds()
            tell(error, seconds)
        if stop.wait(seconds):
            raise GymError(
                ErrorCode.INTERRUPTED, "stopped while the server was away", "run the same command again"
            )
        client.check_key()
