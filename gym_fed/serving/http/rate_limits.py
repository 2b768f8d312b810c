"""Rate limits per key: requests and tokens per minute, as token buckets.

A key starts with the share of one minute of both. A request takes one from the request bucket on arrival. Its tokens
are taken when it ends, since their number is not known before. The token bucket may therefore become negative; the key
must then wait until it is refilled. Full buckets are dropped, so only the keys in use have state. A new key with the
name of an earlier one has its own buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gym_fed.core.errors import ErrorCode
from gym_fed.serving.openai.catalogue import Caller
from gym_fed.serving.openai.refusals import RequestError

_MINUTE = 60.0
_MAX_BUCKETS = 1024

LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{name}"
    for figure in ("limit", "remaining", "reset")
    for name in ("requests", "tokens")
)

Headers = dict[str, str]


class RateLimited(RequestError):
    """Raised if a key has used up its share.

    Attributes:
        retry_after: Seconds until the next request may be sent.
        headers: OpenAI's headers with the remaining shares.
    """

    def __init__(self, message: str, retry_after: int, headers: Headers) -> None:
        super().__init__(
            message,
            name="rate_limit_exceeded",
            code=ErrorCode.QUOTA_EXCEEDED,
            hint=f"try again in {retry_after} s",
        )
        self.retry_after = retry_after
        self.headers = headers


@dataclass
class _Bucket:
    """The bucket of one key, for requests or tokens.

    Attributes:
        left: Remaining requests or tokens; negative if tokens are owed.
        at: The time to which ``left`` refers.
    """

    left: float
    at: float

    def fill(self, limit: int, now: float) -> None:
        self.left = min(float(limit), self.left + limit * (now - self.at) / _MINUTE)
        self.at = now


class RateLimits:
    """The buckets of all keys. Not thread-safe.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[tuple[str, str, str], _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def admit(self, caller: Caller) -> Headers:
        """Take one request from the caller's bucket.

        Returns:
            The headers ``x-ratelimit-*`` of its answer; empty for a key without limits.

        Raises:
            RateLimited: If the bucket is empty; nothing is taken.
        """
        buckets = self._of(caller)
        for name, (limit, bucket) in buckets.items():
            least = 1.0 if name == "requests" else math.ulp(0.0)
            if bucket.left < least:
                wait = max(1, math.ceil((least - bucket.left) * _MINUTE / limit))
                message = f"this key may use {limit:,} {name} per minute"
                raise RateLimited(message, wait, _headers(buckets))
        if "requests" in buckets:
            buckets["requests"][1].left -= 1
        return _headers(buckets)

    def spend(self, caller: Caller, tokens: int) -> None:
        """Take the tokens of a request that has ended, whether successfully or not."""
        if "tokens" in (buckets := self._of(caller)):
            buckets["tokens"][1].left -= tokens

    def _of(self, caller: Caller) -> dict[str, tuple[int, _Bucket]]:
        """Return the caller's limits and buckets, after refilling them."""
        now = self._now()
        buckets = {}
        limits = {"requests": caller.requests_per_minute, "tokens": caller.tokens_per_minute}
        if len(self._buckets) > _MAX_BUCKETS:
            self._tidy(now)
        for name, limit in limits.items():
            if limit is not None:
                bucket = self._buckets.setdefault(
                    (caller.name, caller.key_sha256, name), _Bucket(float(limit), now)
                )
                bucket.fill(limit, now)
                buckets[name] = (limit, bucket)
        return buckets

    def _tidy(self, now: float) -> None:
        """Drop full buckets, which were unused for a minute and owe no tokens."""
        in_use = {
            key: bucket
            for key, bucket in self._buckets.items()
            if now - bucket.at < _MINUTE or bucket.left < 0
        }
        self._buckets = in_use


def _headers(buckets: dict[str, tuple[int, _Bucket]]) -> Headers:
    headers = {}
    for name, (limit, bucket) in buckets.items():
        headers[f"x-ratelimit-limit-{name}"] = str(limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.left)))
        headers[f"x-ratelimit-reset-{name}"] = _duration((limit - bucket.left) * _MINUTE / limit)
    return headers


def _duration(seconds: float) -> str:
    """Format seconds as in OpenAI's headers: ``120ms``, ``6.5s``, ``1m30s``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, _MINUTE)
    return f"{int(minutes)}m{int(rest)}s" if minutes else f"{round(rest, 1):g}s"
