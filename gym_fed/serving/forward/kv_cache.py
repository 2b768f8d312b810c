"""The KV cache of one request: which blocks of the pool hold its tokens, in which order."""

from __future__ import annotations

from array import array

from gym_quant.kernels.attention import BLOCK_TOKENS

from gym_fed.serving.forward.kv_blocks import KVBlocks


class KVCache:
    """Keys and values of one request's tokens. ``KVPool.new_cache`` makes one; only a step writes to it."""

    def __init__(self, pool: KVBlocks, blocks: array[int], length: int) -> None:
        self.pool = pool
        self.blocks = blocks
        self.length = length
        """Tokens in the cache: the position of the next one."""

    @property
    def capacity(self) -> int:
        """Tokens for which it holds blocks."""
        return BLOCK_TOKENS * len(self.blocks)

    @property
    def bytes(self) -> int:
        """Of its blocks, those included that it shares."""
        return len(self.blocks) * self.pool.block_bytes

    def reserve(self, tokens: int) -> bool:
        """Take the blocks for so many more tokens; False, and nothing changed, where there are not so many free."""
        if tokens <= 0:
            return True
        more = -(-(self.length + tokens) // BLOCK_TOKENS) - len(self.blocks)
        at = self.length // BLOCK_TOKENS
        shared = at < len(self.blocks) and self.pool.users(self.blocks[at]) > 1
        if at < len(self.blocks) and not shared and self.pool.keeper is not None:
            self.pool.keeper.written(self.blocks[at])
        if more <= 0 and not shared:
            return True
        taken = self.pool.take(max(0, more) + shared)
        if taken is None:
            return False
        if shared:
            own = taken.pop()
            self.pool.copy(self.blocks[at], own)
            self.pool.drop(self.blocks[at : at + 1])
            self.blocks[at] = own
        self.blocks.extend(taken)
        return True

    def advance(self, tokens: int) -> None:
        """Count the tokens of a step that has succeeded: only now do they belong to the cache."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Drop all tokens from this position on, and the blocks that only they needed.

        Raises:
            ValueError: For a position beyond the last.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length {length} is not from 0 to {self.length}")
        kept = -(-length // BLOCK_TOKENS)
        self.pool.drop(self.blocks[kept:])
        del self.blocks[kept:]
        self.length = length

    def branch(self) -> KVCache:
        """A cache for another text with the same beginning: it shares the blocks of all tokens of now."""
        used = self.blocks[: -(-self.length // BLOCK_TOKENS)]
        for block in used:
            self.pool.share(block)
        return KVCache(self.pool, used, self.length)

    def release(self) -> None:
        """Give all blocks back. May be called again."""
        self.pool.drop(self.blocks)
        self.blocks = array("i")
        self.length = 0

    def __del__(self) -> None:
        if self.blocks:
            self.pool.return_later(self.blocks)
