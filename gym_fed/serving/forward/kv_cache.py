"""The paged KV cache: keys and values of all requests in blocks of 16 tokens, with a block table per request.

A request takes a block when it needs one, and returns all its blocks when it ends. Memory is not reserved in
advance, requests with the same prefix can share blocks (``branch``, ``prefix_cache``), and blocks are never moved. A
shared block is copied before it is written to.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from gym_quant.kernels.attention import BLOCK_TOKENS, KV_DTYPES, PagedLayer

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

_FIRST_BLOCKS = 16
"""Minimum number of blocks by which a pool grows."""


@dataclass(frozen=True)
class LayerShape:
    """The number of key heads of a layer, and the sizes of a key and of a value."""

    kv_heads: int
    dim: int
    value_dim: int


class Keeper(Protocol):
    """The interface of a prefix cache, which keeps unused blocks until other requests need them."""

    @property
    def evictable(self) -> int: ...

    def keep(self, block: int) -> bool: ...

    def reuse(self, block: int) -> None: ...

    def evict(self) -> int: ...

    def written(self, block: int) -> None: ...


class KVPool:
    """The KV blocks of one model; all layers share the block ids. Not thread-safe, except ``return_later``.

    Args:
        bytes_limit: Maximum size in bytes of all layers; None: the pool grows as needed.
        dtype: ``float32``, ``bfloat16`` or ``int8`` (with a scale per token and head).
        shapes: The shape of every layer, by its number; required for a limited pool. Other layers are added on first
            use.
        device: The device of the blocks.

    Raises:
        GymError: ``USAGE`` for any other dtype; ``CONFIG_INVALID`` for a limit below one block, or beyond the memory.

    Attributes:
        paged: True if the blocks hold the tokens, so that requests can share a prefix and drop their last tokens.
        fixed_blocks: Blocks that a request takes in addition to those of its tokens.
    """

    paged = True
    fixed_blocks = 0

    def __init__(
        self,
        bytes_limit: int | None = None,
        *,
        dtype: str = "float32",
        shapes: Mapping[int, LayerShape] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in KV_DTYPES:
            raise GymError(
                ErrorCode.USAGE, f"KV cache dtype must be one of {', '.join(KV_DTYPES)}, not {dtype}"
            )
        self.dtype = dtype
        self.layers: dict[int, PagedLayer] = {}
        self.keeper: Keeper | None = None
        self._device = device
        self._limited = bytes_limit is not None
        self._free: list[int] = []
        self._users: list[int] = []
        """The number of users of each block; blocks that were never used have no entry."""
        self._num_blocks = 0
        self._returned: deque[array[int]] = deque()
        """Blocks of caches that were dropped without ``release``, on any thread."""
        for number, shape in (shapes or {}).items():
            self.layer(number, shape)
        blocks = _FIRST_BLOCKS
        if bytes_limit is not None:
            blocks = bytes_limit // max(1, self.block_bytes)
            if not self.block_bytes or not blocks:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"a KV cache of {counted(bytes_limit, 'byte')} is smaller than one block of {BLOCK_TOKENS} tokens "
                    f"({counted(self.block_bytes, 'byte')})",
                    "raise engine.kv_cache_size",
                )
        try:
            self._grow(blocks)
        except RuntimeError as error:  # torch has no other error for a lack of memory on a CPU
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"a KV cache of {counted(blocks * self.block_bytes, 'byte')} does not fit in memory",
                "lower engine.kv_cache_size",
            ) from error

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """The shape of every layer so far."""
        return {n: LayerShape(layer.kv_heads, layer.dim, layer.value_dim) for n, layer in self.layers.items()}

    @property
    def num_blocks(self) -> int:
        """The number of allocated blocks; a limited pool allocates its maximum at once."""
        return self._num_blocks

    @property
    def free_blocks(self) -> int:
        """The number of unused blocks, including those that a prefix cache keeps."""
        self._take_back()
        evictable = 0 if self.keeper is None else self.keeper.evictable
        return len(self._free) + self._num_blocks - len(self._users) + evictable

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(layer.block_bytes for layer in self.layers.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.block_bytes // BLOCK_TOKENS

    @property
    def bytes_used(self) -> int:
        """Bytes of the blocks that requests use."""
        return (self.num_blocks - self.free_blocks) * self.block_bytes

    def layer(self, number: int, shape: LayerShape) -> PagedLayer:
        """Return the blocks of a layer; allocate those of a new layer.

        Raises:
            GymError: ``MODEL_INVALID`` if the layer had a different shape before.
        """
        paged = self.layers.get(number)
        if paged is None:
            paged = PagedLayer(
                self.num_blocks, shape.kv_heads, shape.dim, shape.value_dim, self.dtype, self._device
            )
            self.layers[number] = paged
        elif (paged.kv_heads, paged.dim, paged.value_dim) != (shape.kv_heads, shape.dim, shape.value_dim):
            raise GymError(
                ErrorCode.MODEL_INVALID, f"layer {number} has {shape}, but had {self.shapes[number]} before"
            )
        return paged

    def like(self, bytes_limit: int | None) -> KVPool:
        """Create a pool for the same model. Raises the errors of the constructor."""
        return KVPool(bytes_limit, dtype=self.dtype, shapes=self.shapes, device=self._device)

    # Called by caches and the prefix cache.

    def users(self, block: int) -> int:
        """Return the number of caches that hold a block."""
        return self._users[block]

    def share(self, block: int) -> None:
        """Count one more user of a block."""
        if not self._users[block] and self.keeper is not None:
            self.keeper.reuse(block)
        self._users[block] += 1

    def take(self, count: int) -> list[int] | None:
        """Take ``count`` blocks for one user; if fewer are free, take none and return None."""
        self._take_back()
        lacking = count - self.free_blocks
        if lacking > 0:
            if self._limited:
                return None
            self._grow(max(2 * self.num_blocks, self.num_blocks + lacking))
        blocks = []
        for _ in range(count):
            if self._free:
                blocks.append(self._free.pop())
            elif len(self._users) < self._num_blocks:
                blocks.append(len(self._users))
                self._users.append(0)
            else:
                assert self.keeper is not None  # free_blocks included the blocks that it keeps
                blocks.append(self.keeper.evict())
            self._users[blocks[-1]] = 1
        return blocks

    def drop(self, blocks: Sequence[int]) -> None:
        """Remove one user from each block; of these, a prefix cache evicts the last block first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block] and (self.keeper is None or not self.keeper.keep(block)):
                self._free.append(block)

    def free(self, block: int) -> None:
        """Free a block that the prefix cache no longer keeps."""
        self._free.append(block)

    def copy(self, source: int, target: int) -> None:
        """Copy a block to another, in all layers."""
        for layer in self.layers.values():
            layer.copy_block(source, target)

    def new_cache(self, prefix: Sequence[int] = ()) -> KVCache:
        """Create the cache of one request, beginning with these full blocks."""
        for block in prefix:
            self.share(block)
        return KVCache(self, array("i", prefix), BLOCK_TOKENS * len(prefix))

    def return_later(self, blocks: array[int]) -> None:
        """Return blocks from any thread; they become free at the next use of the pool."""
        self._returned.append(blocks)

    def _take_back(self) -> None:
        while self._returned:
            self.drop(self._returned.popleft())

    def _grow(self, num_blocks: int) -> None:
        for number, layer in self.layers.items():
            self.layers[number] = layer.grown(num_blocks)
        self._num_blocks = num_blocks


def no_room(tokens: int) -> GymError:
    """Return the error for a pool without room for more tokens of a request."""
    return GymError(
        ErrorCode.BUSY,
        f"the KV cache has no room for {counted(tokens, 'more token')} of a request",
        "raise engine.kv_cache_size, or send fewer requests at once",
    )


class KVCache:
    """The keys and values of one request's tokens. ``KVPool.new_cache`` creates it; only a step writes to it."""

    def __init__(self, pool: KVPool, blocks: array[int], length: int) -> None:
        self.pool = pool
        self.blocks = blocks
        self.length = length
        """The number of tokens in the cache, which is the position of the next one."""

    @property
    def capacity(self) -> int:
        """The number of tokens for which the cache has blocks."""
        return BLOCK_TOKENS * len(self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes of the blocks, including shared ones."""
        return len(self.blocks) * self.pool.block_bytes

    def reserve(self, tokens: int) -> bool:
        """Take the blocks for ``tokens`` more tokens; if too few are free, take none and return False."""
        if tokens <= 0:
            return True
        more = -(-(self.length + tokens) // BLOCK_TOKENS) - len(self.blocks)
        at = self.length // BLOCK_TOKENS
        shared = at < len(self.blocks) and self.pool.users(self.blocks[at]) > 1
        if at < len(self.blocks) and not shared and self.pool.keeper is not None:
            self.pool.keeper.written(self.blocks[at])
        if more <= 0 and not shared:
            return True
        blocks = self.pool.take(max(0, more) + shared)
        if blocks is None:
            return False
        if shared:
            own = blocks.pop()
            self.pool.copy(self.blocks[at], own)
            self.pool.drop(self.blocks[at : at + 1])
            self.blocks[at] = own
        self.blocks.extend(blocks)
        return True

    def advance(self, tokens: int) -> None:
        """Count the tokens of a step after it has succeeded."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Drop all tokens from a position on, and the blocks that only they use.

        Raises:
            ValueError: For a position beyond the last.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length {length} is not between 0 and {self.length}")
        num_blocks = -(-length // BLOCK_TOKENS)
        self.pool.drop(self.blocks[num_blocks:])
        del self.blocks[num_blocks:]
        self.length = length

    def branch(self) -> KVCache:
        """Create a cache for another text with the same prefix, which shares all blocks."""
        used = self.blocks[: -(-self.length // BLOCK_TOKENS)]
        for block in used:
            self.pool.share(block)
        return KVCache(self.pool, used, self.length)

    def release(self) -> None:
        """Release all blocks. May be called repeatedly."""
        self.pool.drop(self.blocks)
        self.blocks = array("i")
        self.length = 0

    def __del__(self) -> None:
        if self.blocks:
            self.pool.return_later(self.blocks)
