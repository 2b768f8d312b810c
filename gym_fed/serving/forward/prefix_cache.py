"""Automatic prefix caching: a prompt that begins as an earlier one takes the earlier one's KV blocks.

Only full blocks are kept, and found by a chain: the scope, the tokens of the first block, then of the next. Keys are
the tokens themselves and not their hashes, so nobody can make two prompts meet; of a picture they have the digest. A
scope is one variant (by its digest, or the base) and one user: what one user has sent is never seen by another, not
even by how long an answer takes.
Blocks that no request uses any more stay until others need them; then the one goes that was not used for longest, and
of one prompt its end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from gym_quant.kernels.attention import BLOCK_TOKENS

from gym_fed.serving.forward.kv_cache import KVCache, KVPool
from gym_fed.serving.forward.picture_rows import PlacedPicture, block_key


@dataclass(frozen=True)
class _KeptBlock:
    """A full block, its place in the chain, and how its predecessors are found."""

    number: int
    key: tuple[Hashable, Hashable]
    scope: Hashable


class PrefixCache:
    """Of one pool, whose unused blocks it keeps; one thread at a time.

    Args:
        pool: Evicts its blocks from here when it has no other.

    Attributes:
        tokens_asked: Tokens of all prompts that were looked up.
        tokens_found: How many of these were in the cache.
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
        """Blocks that can be found."""
        return len(self._entries)

    def new_cache(
        self, scope: Hashable, token_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()
    ) -> KVCache:
        """A cache with the longest beginning of the prompt that is there.

        Its ``length`` is the tokens that need no prefill. At least one token is left for a step, or there would be no
        logits.

        Args:
            scope: The variant's digest (None: the base) and the user; nothing of another scope is found.
            token_ids: The prompt.
            pictures: In it.
        """
        found: list[int] = []
        parent: Hashable = (scope,)
        for start in range(0, (len(token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            block = self._blocks.get((parent, block_key(token_ids, pictures, start, start + BLOCK_TOKENS)))
            if block is None:
                break
            found.append(block)
            parent = self._entries[block].number
        self.tokens_asked += len(token_ids)
        self.tokens_found += BLOCK_TOKENS * len(found)
        return self._pool.new_cache(found)

    def insert(
        self,
        scope: Hashable,
        token_ids: Sequence[int],
        cache: KVCache,
        pictures: Sequence[PlacedPicture] = (),
    ) -> None:
        """Let others find the full blocks of a cache; those that are there already stay.

        Args:
            scope: As in ``new_cache``.
            token_ids: The ids of the tokens in the cache, from the first on; more are ignored.
            cache: Holds them.
            pictures: Among them.
        """
        parent: Hashable = (scope,)
        for at in range(min(len(token_ids), cache.length) // BLOCK_TOKENS):
            start = BLOCK_TOKENS * at
            key = (parent, block_key(token_ids, pictures, start, start + BLOCK_TOKENS))
            block = self._blocks.get(key)
            if block is None:
                block = cache.blocks[at]
                self.written(block)  # its chain is broken: of its predecessors, another's block was evicted
                self._blocks[key] = block
                self._entries[block] = _KeptBlock(self._next, key, scope)
                self._next += 1
            parent = self._entries[block].number

    def forget(self, scope: Hashable) -> None:
        """Nothing of this scope is found any more."""
        for block in [block for block, entry in self._entries.items() if entry.scope == scope]:
            self._forget(block)
            if block in self._unused:
                del self._unused[block]
                self._pool.free(block)

    # For the pool (``kv_pool.Keeper``).

    @property
    def evictable(self) -> int:
        """See ``Keeper``."""
        return len(self._unused)

    def keep(self, block: int) -> bool:
        """See ``Keeper``."""
        if block not in self._entries:
            return False
        self._unused[block] = None
        return True

    def reuse(self, block: int) -> None:
        """See ``Keeper``."""
        self._unused.pop(block, None)

    def evict(self) -> int:
        """See ``Keeper``."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        return block

    def written(self, block: int) -> None:
        """See ``Keeper``."""
        if block in self._entries:
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._entries.pop(block).key]
