"""Admission of waiting requests: the least served user's first, once its variant is loaded and KV blocks are free."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.scheduler import PROMPT_WEIGHT, FairQueue, TokenCounters
from gym_fed.serving.forward.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Hashable

    from gym_fed.serving.engine.sequence import ScheduledRequest
    from gym_fed.serving.forward.kv_cache import KVPool
    from gym_fed.serving.forward.loaded import LoadedVariant, VariantSource


log = logging.getLogger("gym_fed")

_MOST_LOADING = 64
"""Maximum number of variants that load at once; more would evict one another."""

_BYPASS_TIMEOUT_SECONDS = 5.0
"""How long others may bypass a request whose variant has no room because their variants are in use. After that, no
other request with a variant is admitted before it, so that it cannot starve. A slow load may always be bypassed."""


class AdmissionQueue:
    """The waiting requests.

    Args:
        tokens: The token counters of all users.
        source: Loads variants.
        kv: Allocates KV caches.
        fail: Ends a request whose variant cannot be loaded.
    """

    def __init__(
        self,
        tokens: TokenCounters,
        source: VariantSource | None,
        kv: KVCacheManager,
        fail: Callable[[ScheduledRequest, GymError], None],
    ) -> None:
        self.waiting = FairQueue(tokens)
        self._tokens = tokens
        self._source = source
        self._kv = kv
        self._fail = fail
        self._arrivals = 0

    def put(self, request: ScheduledRequest) -> None:
        """Append a new request to its user's queue."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._tokens.arrive(request.user)
        self.waiting.put(request)

    def put_back(self, request: ScheduledRequest) -> None:
        """Put a preempted request at the front of its user's queue. It keeps its variant."""
        self.waiting.put(request, front=True)

    def admit(self, count: int) -> list[ScheduledRequest]:
        """Take up to ``count`` requests from the queue, with their variants and caches."""
        absent: dict[str, bool] = {}
        admitted: list[ScheduledRequest] = []
        while len(admitted) < count and len(self.waiting):
            request = self._next(absent)
            if request is None:
                break
            admitted.append(request)
        return admitted

    def release(self, request: ScheduledRequest) -> None:
        """Unpin a request's variant. An error of the source is logged, since it must not fail the running answers."""
        variant, request.variant = request.variant, None
        if variant is None or self._source is None:
            return
        try:
            self._source.release(variant)
        except Exception:
            log.exception("variant %s could not be released", variant.name)

    def _next(self, absent: dict[str, bool]) -> ScheduledRequest | None:
        """Return the next request whose variant is in memory; none may bypass a request that waits for KV blocks."""
        makes_room = False
        for request in self.waiting.by_priority():
            pinned = request.variant is not None  # it was preempted
            if makes_room and request.variant_name is not None and not pinned:
                continue
            try:
                ready = pinned or self._pin(request, absent)
            except GymError as error:
                self._fail(request, error)
                continue
            if not ready:
                makes_room = makes_room or self._has_waited(request, absent)
                continue
            if not self._kv.allocate(request):
                if not pinned:
                    self.release(request)
                return None
            self._start(request)
            return request
        return None

    def _start(self, request: ScheduledRequest) -> None:
        self.waiting.remove(request)
        self._tokens.running[request.user] += 1
        if not request.started:  # or it was preempted
            request.started = time.monotonic()
            assert request.cache is not None
            request.cached_tokens = request.cache.length
            self._tokens.charge(request.user, PROMPT_WEIGHT * len(request.prompt_ids))

    def _has_waited(self, request: ScheduledRequest, absent: dict[str, bool]) -> bool:
        """Return whether its variant has found no room for so long that other requests with variants must wait."""
        if request.variant_name is None or not absent.get(request.variant_name, False):
            request.bypassed_since = 0.0
            return False
        now = time.monotonic()
        request.bypassed_since = request.bypassed_since or now
        return now - request.bypassed_since > _BYPASS_TIMEOUT_SECONDS

    def _pin(self, request: ScheduledRequest, absent: dict[str, bool]) -> bool:
        """Pin its variant, and return whether it is in memory.

        ``absent`` collects the variants of this step that are not in memory, and whether they lack room.
        """
        name = request.variant_name
        if name is None:
            return True
        if name in absent or len(absent) >= _MOST_LOADING:
            return False
        request.variant = self._poll(name, absent)
        return request.variant is not None

    def _poll(self, name: str, absent: dict[str, bool]) -> LoadedVariant | None:
        assert self._source is not None  # submission refuses variants without a source
        try:
            variant = self._source.poll(name)
            if variant is None:
                absent[name] = self._source.lacks_room(name)
        except GymError:
            raise
        except Exception as error:
            log.exception("variant %s could not be loaded", name)
            raise GymError(
                ErrorCode.INTERNAL, f"variant {name} could not be loaded: {error!r}", "the log has the trace"
            ) from error
        return variant


_HEADROOM = 16
"""Tokens of an answer for which there must be room when it starts: one block."""


class KVCacheManager:
    """Allocates and frees the KV blocks of requests, on the engine's thread.

    Args:
        pool: The pool that all requests share.
        prefix_cache: Whether a request reuses the blocks of an earlier one with the same prefix; ``shared``: also
            across users.
    """

    def __init__(self, pool: KVPool, *, prefix_cache: bool | Literal["shared"]) -> None:
        self._shared = prefix_cache == "shared"
        self._pool = pool
        self._prefixes = PrefixCache(pool) if prefix_cache else None

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks that requests hold."""
        return self._pool.bytes_used

    def allocate(self, request: ScheduledRequest) -> bool:
        """Give a request its cache, which may begin with cached blocks; False if there is no room yet."""
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
        """Make the request's computed blocks available to later requests of the same scope."""
        if self._prefixes is not None and request.cache is not None:
            # The newest token was sampled and may not have been computed.
            self._prefixes.insert(self._scope(request), request.ids[:-1], request.cache, request.pictures)

    def free(self, request: ScheduledRequest) -> None:
        """Return its blocks to the pool."""
        if request.cache is not None:
            request.cache.release()
            request.cache = None

    def _scope(self, request: ScheduledRequest) -> Hashable:
        """Return the scope of sharing: one variant by name and file, and one user unless users share."""
        digest = None if request.variant is None else request.variant.delta_sha256
        user = None if self._shared else (request.user, request.key_digest)
        return digest, request.variant_name, user, request.cache_key
