"""Rate limits per account or address: calls per second, concurrent calls, and enrolments.

Memory is bounded: the longest idle key is dropped first, and gets a full bucket when it returns.
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
"""Maximum number of keys; each takes about 200 bytes."""
BURST_MINUTES = 4
"""Burst of enrolment attempts per address, as minutes at the full rate; enough for a classroom or a small office."""
ADDRESSES = 20
"""Limit on new accounts of an open hub, as the number of addresses that create accounts at their full rate."""


class TokenBuckets:
    """Token buckets by key: each gains ``rate`` tokens per second, up to ``burst``. Thread-safe.

    Args:
        rate: Tokens per second.
        burst: Capacity of a bucket, and its initial content, in tokens.
        max_keys: Maximum number of buckets in memory.
        clock: Monotonic clock in seconds; tests pass their own.
    """

    def __init__(
        self,
        rate: float,
        burst: float,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if rate <= 0 or burst < 1 or max_keys < 1:
            raise ValueError(f"rate {rate} must be above 0, burst {burst} and max_keys {max_keys} at least 1")
        self._rate, self._burst, self._max_keys, self._clock = rate, burst, max_keys, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, time
        self._lock = threading.Lock()

    def take(self, key: str, tokens: float = 1.0) -> float:
        """Take tokens from a key's bucket if it has enough.

        Returns:
            0 if they were taken, else the seconds until the bucket has enough.
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
    """Limits concurrent calls per key to ``most``. Not thread-safe; use it only on the event loop's thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, key: str) -> Iterator[bool]:
        """Hold a slot during the block; yield False without holding one if all are taken."""
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
    """Return the key under which a connection is limited: its IPv4 address, or its /64 network for IPv6.

    A household usually has an entire /64 network.

    Args:
        peer: Peer in gRPC's notation: ``ipv4:10.0.0.1:4711``, ``ipv6:%5B::1%5D:4711`` (or with brackets).
    """
    host = host_of(peer)
    try:
        return network_of(host) if host else peer[:100]
    except ValueError:
        return peer[:100]


def host_of(peer: str) -> str:
    """Return the IP address of a connection in gRPC's notation; empty if it is not an internet connection."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0].removeprefix("::ffff:")
    return host if kind in ("ipv4", "ipv6") else ""


class EnrolmentLimits:
    """Limits enrolment attempts per address: invite guesses, and new accounts on an open hub.

    Only keys that the hub does not know count, so that account owners are never locked out. An attempt with a valid
    invite or an allow-listed key costs nothing. A refused attempt costs a token, and an address without tokens is
    refused before its invite is looked up. On an open hub, all addresses also share one limit, against an attacker with
    many addresses. Only signed requests with proof of work count towards it, so that exhausting it is expensive. It
    does not apply to contributors with an invite.

    Args:
        per_minute: Attempts per minute and address, ``limits.enrolments_per_minute``.
        is_open: True if everybody may enrol.
        clock: Monotonic clock in seconds; tests pass their own.
    """

    def __init__(self, per_minute: float, is_open: bool, clock: Callable[[], float] = time.monotonic) -> None:
        rate, burst = per_minute / 60, max(1.0, BURST_MINUTES * per_minute)
        self._is_open = is_open
        self._addresses = TokenBuckets(rate, burst, clock=clock)
        self._all = TokenBuckets(ADDRESSES * rate, ADDRESSES * burst, max_keys=1, clock=clock)

    @contextmanager
    def attempt(self, address: str) -> Iterator[Callable[[], None]]:
        """Count the enrolment attempt that runs in the block.

        Yields a function that takes a token of the shared limit, to be called as the last check; it may also raise
        ``BUSY``.

        Raises:
            GymError: ``BUSY`` with the seconds to wait, before the block is entered.
        """
        self._require(
            self._addresses.take(address), f"too many new contributors or invite attempts from {address}"
        )
        yield self._admit
        if not self._is_open:
            self._addresses.take(address, -1.0)  # return the token after an enrolment by invite or allow-list

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
