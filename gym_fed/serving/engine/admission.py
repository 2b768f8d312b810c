"""Admit waiting requests, those of the least served user first, and cache prefixes.

A request is admitted when its variant is loaded and KV blocks are free. A prompt reuses the KV blocks of an earlier one
with the same prefix. Only full blocks are cached. They are looked up by a chain of keys: the scope, the tokens of the
first block, those of the next, and so on. Keys are the tokens themselves, not their hashes, so collisions cannot be
constructed; pictures are represented by their digests. A scope is one variant (by its digest, or the base) and one
user, so that no user learns what another has sent, not even from timing. Unused blocks stay cached until others need
them. The least recently used block is then evicted; the end of a prompt is evicted before its beginning.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gym_quant.kernels.attention import BLOCK_TOKENS

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.scheduler import PROMPT_WEIGHT, FairQueue, TokenCounters
from gym_fed.serving.forward.chunk import PlacedPicture, block_key
from gym_fed.serving.forward.kv_cache import KVCache, KVPool

if TYPE_CHECKING:
    from gym_fed.serving.engine.sequence import ScheduledRequest
    from gym_fed.serving.forward.variant_weights import LoadedVariant, VariantSource


log = logging.getLogger("gym_fed")

_MAX_LOADING = 64
"""Maximum number of variants to load concurrently; more would evict each other."""

_BYPASS_TIMEOUT_SECONDS = 5.0
"""Seconds for which others may bypass a request whose variant does not fit into memory next to those in use. After
that, no other request with a variant is admitted before it, to prevent starvation. A request that waits for a slow load
may always be bypassed."""


class KVAllocator(Protocol):
    """The interface for allocating the KV caches of requests."""

    def allocate(self, request: ScheduledRequest) -> bool:
        """Allocate a request's cache; return False if there is no room yet."""


class AdmissionQueue:
    """The waiting requests.

    Args:
        tokens: The token counters of all users.
        source: The source of variants.
        kv: The allocator of KV caches.
        fail: Function that ends a request whose variant cannot be loaded.
        vocab_size: The number of the base's token ids.
    """

    def __init__(
        self,
        tokens: TokenCounters,
        source: VariantSource | None,
        kv: KVAllocator,
        fail: Callable[[ScheduledRequest, GymError], None],
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
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
        """Put a preempted request at the front of its user's queue; its variant stays pinned."""
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
        """Unpin a request's variant. Errors from the source are logged, since they must not affect running answers."""
        variant, request.variant = request.variant, None
        if variant is None or self._source is None:
            return
        try:
            self._source.release(variant)
        except Exception:
            log.exception("variant %s could not be released", variant.name)

    def _next(self, absent: dict[str, bool]) -> ScheduledRequest | None:
        """Return the next request whose variant is in memory, or None; one that waits for KV blocks is not bypassed."""
        makes_room = False
        for request in self.waiting.by_priority():
            pinned = request.variant is not None  # the request was preempted
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
        if not request.started:  # or the request was preempted
            request.started = time.monotonic()
            request.cached_tokens = 0 if request.cache is None else request.cache.length
            self._tokens.charge(request.user, PROMPT_WEIGHT * len(request.prompt_ids))

    def _has_waited(self, request: ScheduledRequest, absent: dict[str, bool]) -> bool:
        """Return True if a request's variant has lacked room for so long that other variants must wait."""
        if request.variant_name is None or not absent.get(request.variant_name, False):
            request.bypassed_since = 0.0
            return False
        now = time.monotonic()
        request.bypassed_since = request.bypassed_since or now
        return now - request.bypassed_since > _BYPASS_TIMEOUT_SECONDS

    def _pin(self, request: ScheduledRequest, absent: dict[str, bool]) -> bool:
        """Pin a request's variant if it is in memory, and return whether it is.

        ``absent`` collects the variants of this step that are not in memory, and whether they wait for room.
        """
        name = request.variant_name
        if name is None:
            return True
        if name in absent or len(absent) >= _MAX_LOADING:
            return False
        request.variant = self._poll(name, request.user, absent)
        if request.variant is None:
            return False
        rows = request.variant.vocabulary
        if (self._vocab_size if rows is None else rows.size) != request.vocab_size:
            self.release(request)
            request.variant = None
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"variant {name} was replaced by one with different tokens while a request waited for it",
                "send the request again",
            )
        return True

    def _poll(self, name: str, user: str, absent: dict[str, bool]) -> LoadedVariant | None:
        assert self._source is not None  # submission refuses variants without a source
        try:
            variant = self._source.poll(name, user)
            if variant is None:
                absent[name] = self._source.lacks_room(name)
        except GymError:
            raise
        except Exception as error:
            log.exception("variant %s could not be loaded", name)
            raise GymError(
                ErrorCode.INTERNAL,
                f"variant {name} could not be loaded: {error!r}",
                "the log has the traceback",
            ) from error
        return variant


_HEADROOM = 16
"""Number of answer tokens for which there must be room when a request is admitted: one block."""


@dataclass(frozen=True)
class _KeptBlock:
    """A cached full block, its position in the chain, and the key of its predecessors."""

    number: int
    key: tuple[Hashable, Hashable]
    scope: Hashable


class PrefixCache:
    """The prefix cache of one pool, which keeps the pool's unused blocks. Not thread-safe.

    Args:
        pool: The pool, which evicts blocks from this cache when it has no free ones.

    Attributes:
        tokens_asked: Number of tokens of all prompts that were looked up.
        tokens_found: The number of these tokens that were in the cache.
    """

    def __init__(self, pool: KVPool) -> None:
        self.tokens_asked = 0
        self.tokens_found = 0
        self._pool = pool
        self._blocks: dict[tuple[Hashable, Hashable], int] = {}
        self._entries: dict[int, _KeptBlock] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._next = 0
        pool.keeper = self

    def __len__(self) -> int:
        """Return the number of cached blocks."""
        return len(self._entries)

    def new_cache(
        self, scope: Hashable, token_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()
    ) -> KVCache:
        """Create a cache with the longest cached prefix of the prompt.

        Its ``length`` is the number of tokens that need no prefill. At least one token is left for a step, which must
        compute logits.

        Args:
            scope: The variant's digest (None: the base) and the user; blocks of other scopes are not used.
            token_ids: The prompt.
            pictures: The pictures in it.
        """
        blocks: list[int] = []
        parent: Hashable = (scope,)
        for start in range(0, (len(token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            block = self._blocks.get((parent, block_key(token_ids, pictures, start, start + BLOCK_TOKENS)))
            if block is None:
                break
            blocks.append(block)
            parent = self._entries[block].number
        self.tokens_asked += len(token_ids)
        self.tokens_found += BLOCK_TOKENS * len(blocks)
        return self._pool.new_cache(blocks)

    def insert(
        self,
        scope: Hashable,
        token_ids: Sequence[int],
        cache: KVCache,
        pictures: Sequence[PlacedPicture] = (),
    ) -> None:
        """Add the full blocks of a request's cache; blocks that are cached already are kept.

        Args:
            scope: See ``new_cache``.
            token_ids: The ids of the tokens in the cache; further ones are ignored.
            cache: The cache that holds the tokens.
            pictures: The pictures among them.
        """
        parent: Hashable = (scope,)
        for at in range(min(len(token_ids), cache.length) // BLOCK_TOKENS):
            start = BLOCK_TOKENS * at
            key = (parent, block_key(token_ids, pictures, start, start + BLOCK_TOKENS))
            block = self._blocks.get(key)
            if block is None:
                block = cache.blocks[at]
                self.written(block)  # drop an entry whose predecessor was evicted
                self._blocks[key] = block
                self._entries[block] = _KeptBlock(self._next, key, scope)
                self._next += 1
            parent = self._entries[block].number

    def forget(self, scope: Hashable) -> None:
        """Drop all blocks of this scope."""
        for block in [block for block, entry in self._entries.items() if entry.scope == scope]:
            self._forget(block)
            if block in self._unused:
                del self._unused[block]
                self._pool.free(block)

    # Called by the pool.

    @property
    def evictable(self) -> int:
        """The number of unused blocks in the cache."""
        return len(self._unused)

    def keep(self, block: int) -> bool:
        """Keep a block that is no longer in use; return False if it is not a cached block."""
        if block not in self._entries:
            return False
        self._unused[block] = None
        return True

    def reuse(self, block: int) -> None:
        """Record that an unused block is in use again."""
        self._unused.pop(block, None)

    def evict(self) -> int:
        """Remove the least recently used block from the cache, and return it."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        return block

    def written(self, block: int) -> None:
        """Remove a block from the cache because its contents will change."""
        if block in self._entries:
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._entries.pop(block).key]


class KVCacheManager:
    """Allocates and frees the KV blocks of requests, on the engine's thread.

    Args:
        pool: The pool that all requests share.
        prefix_cache: True if requests reuse the blocks of earlier ones with the same prefix; ``shared`` if also across
            users. Ignored for a pool that is not paged.
    """

    def __init__(self, pool: KVPool, *, prefix_cache: bool | Literal["shared"]) -> None:
        self._shared = prefix_cache == "shared"
        self._pool = pool
        self._prefixes = PrefixCache(pool) if prefix_cache and pool.paged else None

    @property
    def bytes_used(self) -> int:
        """The bytes of the blocks that requests hold."""
        return self._pool.bytes_used

    def allocate(self, request: ScheduledRequest) -> bool:
        """Allocate a request's cache, which may begin with cached blocks; return False if there is no room yet."""
        ids = request.ids
        if self._prefixes is None or request.hidden is not None:  # an embedding needs all its tokens' states
            cache = self._pool.new_cache()
        else:
            cache = self._prefixes.new_cache(self._scope(request), ids, request.pictures)
        if not cache.reserve(min(len(ids) + _HEADROOM, request.most_tokens) - cache.length):
            cache.release()
            return False
        request.cache = cache
        return True

    def share(self, request: ScheduledRequest) -> None:
        """Add the request's computed blocks to the prefix cache, for later requests of the same scope."""
        if self._prefixes is not None and request.cache is not None:
            # The newest token was sampled and may not have been computed.
            self._prefixes.insert(self._scope(request), request.ids[:-1], request.cache, request.pictures)

    def free(self, request: ScheduledRequest) -> None:
        """Release the request's blocks to the pool."""
        if request.cache is not None:
            request.cache.release()
            request.cache = None

    def _scope(self, request: ScheduledRequest) -> Hashable:
        """Return the scope of shared blocks: one variant, by name and file, and one user unless users share."""
        digest = None if request.variant is None else request.variant.delta_sha256
        user = None if self._shared else (request.user, request.key_digest)
        return digest, request.variant_name, user, request.cache_key
