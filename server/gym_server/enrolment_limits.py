"""How often one address may try to become a new contributor: guesses of invites, and accounts at an open hub.

Only keys that the hub does not know are counted, so that whoever has an account is never kept out. A valid invite, or a
place on the allow-list, costs nothing; what is refused costs an attempt, and an address without attempts is refused
before its guess is looked up. At an open hub all addresses together have a share as well, against one that has many;
only who has signed and done the work takes of it, so that nobody uses it up for nothing. Nobody with an invite is
subject to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gym_fed.errors import ErrorCode, GymError
from gym_server.limits import TokenBuckets

BURST_MINUTES = 4
"""An address that was silent may make the attempts of so many minutes at once: a class room, a small office."""
ADDRESSES = 20
"""An open hub takes at most the new accounts of so many busy addresses."""


class EnrolmentLimits:
    """The attempts of all addresses.

    Args:
        per_minute: Attempts of one address, ``limits.enrolments_per_minute``.
        is_open: Whether everybody may enrol.
        clock: Seconds that never go back; tests bring their own.
    """

    def __init__(self, per_minute: float, is_open: bool, clock: Callable[[], float] = time.monotonic) -> None:
        rate, burst = per_minute / 60, max(1.0, BURST_MINUTES * per_minute)
        self._is_open = is_open
        self._addresses = TokenBuckets(rate, burst, clock=clock)
        self._all = TokenBuckets(ADDRESSES * rate, ADDRESSES * burst, max_keys=1, clock=clock)

    @contextmanager
    def attempt(self, address: str) -> Iterator[Callable[[], None]]:
        """Count the attempt in the block, which is what enrols.

        The block is given what takes of the share of all addresses, to be called once nothing but that is left to
        check; it raises ``BUSY`` too.

        Raises:
            GymError: ``BUSY`` with the seconds to wait, before the block is entered.
        """
        self._require(
            self._addresses.take(address), f"too many new contributors or invites tried from {address}"
        )
        yield self._admit
        if not self._is_open:
            self._addresses.take(address, -1.0)  # it had an invite, or is on the list: given back

    def _admit(self) -> None:
        if self._is_open:
            self._require(self._all.take(""), "too many new contributors at once")

    def _require(self, seconds: float, what: str) -> None:
        if seconds > 0:
            raise GymError(
                ErrorCode.BUSY,
                f"{what}; the next one is looked at in {seconds:.0f} s",
                "gym-client join waits and tries again",
            )
