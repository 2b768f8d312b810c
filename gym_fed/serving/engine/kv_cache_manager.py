"""KV blocks of running requests: what a request takes when it starts, and what later requests find of it.

A request starts when there are blocks for its tokens so far and one more. While it decodes it takes a block when it
needs one; where none is left, the scheduler preempts a request (``scheduler``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gym_fed.serving.forward.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Hashable

    from gym_fed.serving.engine.sequence import ScheduledRequest
    from gym_fed.serving.forward.kv_pool import KVPool

_HEADROOM = 16
"""Tokens of an answer for which there must be room when it starts: one block."""


class KVCacheManager:
    """Gives requests their caches; for the engine's thread.

    Args:
        pool: Of all requests.
        prefix_cache: Whether a request uses the blocks of an earlier one with the same beginning; ``shared``: also of
            another user's.
    """

    def __init__(self, pool: KVPool, *, prefix_cache: bool | Literal["shared"]) -> None:
        self._shared = prefix_cache == "shared"
        self._pool = pool
        self._prefixes = PrefixCache(pool) if prefix_cache else None

    @property
    def bytes_used(self) -> int:
        """Of the blocks that requests hold."""
        return self._pool.bytes_used

    def allocate(self, request: ScheduledRequest) -> bool:
        """Give a request its cache, which may begin with blocks that are computed already; False: no room yet."""
        ids = request.ids
        if (
            self._prefixes is None or request.hidden is not None
        ):  # an embedding needs the states of all its tokens
            cache = self._pool.new_cache()
        else:
            cache = self._prefixes.new_cache(self._scope(request), ids, request.pictures)
        if not cache.reserve(min(len(ids) + _HEADROOM, request.most_tokens) - cache.length):
            cache.release()
            return False
        request.cache = cache
        return True

    def share(self, request: ScheduledRequest) -> None:
        """Let later requests of the same scope find what the request has computed."""
        if self._prefixes is not None and request.cache is not None:
            # The newest token was sampled, and may not be computed.
            self._prefixes.insert(self._scope(request), request.ids[:-1], request.cache, request.pictures)

    def free(self, request: ScheduledRequest) -> None:
        """Take its blocks back."""
        if request.cache is not None:
            request.cache.release()
            request.cache = None

    def _scope(self, request: ScheduledRequest) -> Hashable:
        """Nothing is shared between variants, even of the same file, nor between users unless the server says so."""
        digest = None if request.variant is None else request.variant.delta_sha256
        user = None if self._shared else (request.user, request.key_digest)
        return digest, request.variant_name, user, request.cache_key
