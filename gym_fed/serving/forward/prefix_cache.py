"""Automatic prefix caching: a prompt reuses the KV blocks of an earlier one with the same prefix.

Only full blocks are kept. They are found by a chain: the scope, the tokens of the first block, then of the next. Keys
are the tokens themselves and not their hashes, so collisions cannot be constructed; pictures are represented by their
digests. A scope is one variant (by its digest, or the base) and one user: a user never learns what another has sent,
not even by how long an answer takes.
Unused blocks stay until others need them. Then the least recently used one is evicted, and of one prompt its end
before its beginning.
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
    """A full block, its position in the chain, and the key of its predecessors."""

    number: int
    key: tuple[Hashable, Hashable]
    scope: Hashable


class PrefixCache:
    """The prefix cache of one pool, whose unused blocks it keeps; one thread at a time.

    Args:
        pool: Evicts blocks from here when it has no others.

    Attributes:
        tokens_asked: Tokens of all prompts that were looked up.
        tokens_found: How many of these tokens were in the cache.
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
        """Return the number of blocks that can be found."""
        return len(self._entries)

    def new_cache(
        self, scope: Hashable, token_ids: Sequence[int], pictures: Sequence[PlacedPicture] = ()
    ) -> KVCache:
        """Create a cache with the longest cached prefix of the prompt.

        Its ``length`` counts the tokens that need no prefill. At least one token is left for a step, or there would be
        no logits.

        Args:
            scope: The variant's digest (None: the base) and the user; blocks of another scope are not found.
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
        """Make the full blocks of a cache available; blocks that are there already stay.

        Args:
            scope: As in ``new_cache``.
            token_ids: The ids of the tokens in the cache, from the first on; more are ignored.
            cache: Holds the tokens.
            pictures: The pictures among them.
        """
        parent: Hashable = (scope,)
        for at in range(min(len(token_ids), cache.length) // BLOCK_TOKENS):
            start = BLOCK_TOKENS * at
            key = (parent, block_key(token_ids, pictures, start, start + BLOCK_TOKENS))
            block = self._blocks.get(key)
            if block is None:
                block = cache.blocks[at]
                self.written(block)  # its chain is broken: a predecessor was evicted
                self._blocks[key] = block
                self._entries[block] = _KeptBlock(self._next, key, scope)
                self._next += 1
            parent = self._entries[block].number

    def forget(self, scope: Hashable) -> None:
        """Drop everything of this scope."""
        for block in [block for block, entry in self._entries.items() if entry.scope == scope]:
            self._forget(block)
            if block in self._unused:
                del self._unused[block]
                self._pool.free(block)

    # For the pool.

    @property
    def evictable(self) -> int:
        """The number of blocks that it could give back."""
        return len(self._unused)

    def keep(self, block: int) -> bool:
        """Keep a block that nobody uses any more; returns False for a block that cannot be found."""
        if block not in self._entries:
            return False
        self._unused[block] = None
        return True

    def reuse(self, block: int) -> None:
        """Note that a kept block is in use again."""
        self._unused.pop(block, None)

    def evict(self) -> int:
        """Give back the least recently used block."""
        block, _ = self._unused.popitem(last=False)
        self._forget(block)
        return block

    def written(self, block: int) -> None:
        """Forget a block whose contents change."""
        if block in self._entries:
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._blocks[self._entries.pop(block).key]
