"""Limits by key: how often an account or an address may call, how many calls at once, and how often one may enrol.

Memory is bounded whatever comes in: who was not heard of for longest is forgotten first, and a forgotten one begins
with a full bucket again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from gym_fed.core.addresses import network_of
from gym_fed.core.errors import ErrorCode, GymError

MAX_KEYS = 10_000
"""How many keys are remembered; one takes about 200 bytes."""
BURST_MINUTES = 4
"""An idle address may make this many minutes' attempts at once, as in a class room or a small office."""
ADDRESSES = 20
"""An open hub accepts at most as many new accounts as this many busy addresses can create."""


class TokenBuckets:
    """One token bucket a key: ``rate`` tokens come back every second, up to ``burst``. Safe from any thread.

    Args:
        rate: Tokens a second.
        burst: What a bucket holds at most, and at first.
        max_keys: How many buckets are remembered.
        clock: Seconds that never go back; tests bring their own.
    """

    def __init__(
        self,
        rate: float,
        burst: float,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rate <= 0 or burst < 1 or max_keys < 1:
            raise ValueError(f"rate {rate}, burst {burst} and max_keys {max_keys} must be above 0")
        self._rate, self._burst, self._max_keys, self._clock = rate, burst, max_keys, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key: tokens, as of when
        self._lock = threading.Lock()

    def take(self, key: str, tokens: float = 1.0) -> float:
        """Take tokens out of a key's bucket, if it has them.

        Returns:
            0 when they were taken; else after how many seconds the bucket will have them.
        """
        with self._lock:
            now = self._clock()
            held, since = self._buckets.pop(key, (self._burst, now))
            held = min(self._burst, held + (now - since) * self._rate)
            missing = tokens - held
            self._buckets[key] = (held if missing > 0 else held - tokens, now)
            if len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
        return max(0.0, missing / self._rate)

    def __len__(self) -> int:
        return len(self._buckets)


class CallSlots:
    """How many things of a key run at once: at most ``most``. For one thread, the event loop's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, key: str) -> Iterator[bool]:
        """Hold a slot while the block runs; gives False, and holds none, when all are taken."""
        if self._taken[key] >= self._most:
            yield False
            return
        self._taken[key] += 1
        try:
            yield True
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]

    def __len__(self) -> int:
        return sum(self._taken.values())


def address_of(peer: str) -> str:
    """Whom a connection is counted to: its IPv4 address, or the /64 of its IPv6 address, which one household has.

    Args:
        peer: As gRPC writes it: ``ipv4:10.0.0.1:4711``, ``ipv6:%5B::1%5D:4711`` (or with brackets).
    """
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind not in ("ipv4", "ipv6"):
        return peer[:100]
    try:
        return network_of(host)
    except ValueError:
        return peer[:100]


class EnrolmentLimits:
    """How often one address may try to become a new contributor: guesses of invites, and accounts at an open hub.

    Only keys that the hub does not know are counted, so that the owner of an account is never kept out. A valid invite,
    or a place on the allow-list, costs nothing; what is refused costs an attempt, and an address without attempts is
    refused before its guess is looked up. At an open hub all addresses together have a share as well, against one that
    has many; only who has signed and done the work takes of it, so that nobody uses it up for nothing. Nobody with an
    invite is subject to it.

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
                f"{what}; the next one is checked in {seconds:.0f} s",
                "gym-client join waits and tries again",
            )
