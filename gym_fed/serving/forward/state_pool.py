"""Account for the memory of requests on the general path in blocks, as the paged KV cache does.

The tensors are transformers' own and are not stored in the blocks. The pool only limits how many requests run, with the
same interface as ``KVPool``: a request takes blocks for its fixed state, and one for every 16 tokens. Padding of
requests that share a forward pass is not counted; it at most doubles the memory (``GeneralForward``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from gym_quant.kernels.attention import BLOCK_TOKENS

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.forward.kv_cache import KVCache, KVPool, no_room

if TYPE_CHECKING:
    from gym_fed.serving.forward.chunk import EmbeddedRows
    from gym_fed.serving.forward.model_states import StateRow


class StatePool(KVPool):
    """Block accounting for the requests of one model.

    Args:
        bytes_limit: See ``KVPool``.
        token_bytes: Bytes that a token adds to the state.
        fixed_bytes: Bytes of a request's state that do not depend on its length.
        dtype: The dtype of the model.
        device: Its device.

    Raises:
        GymError: ``CONFIG_INVALID`` for a limit below one request of one token.
    """

    paged = False

    def __init__(
        self,
        bytes_limit: int | None = None,
        *,
        token_bytes: int,
        fixed_bytes: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self._state_block = BLOCK_TOKENS * token_bytes or max(fixed_bytes, 1)
        self._token_bytes, self._fixed_bytes = token_bytes, fixed_bytes
        self.fixed_blocks = -(-fixed_bytes // self._state_block)
        if bytes_limit is not None and bytes_limit < self.blocks_for(1) * self._state_block:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"{counted(bytes_limit, 'byte')} is less than the state of one request, "
                f"{counted(self.blocks_for(1) * self._state_block, 'byte')}",
                "raise engine.kv_cache_size",
            )
        super().__init__(bytes_limit, dtype=dtype, device=device)

    @property
    def block_bytes(self) -> int:
        return self._state_block

    @property
    def bytes_per_token(self) -> int:
        return self._token_bytes

    def like(self, bytes_limit: int | None) -> StatePool:
        return StatePool(
            bytes_limit,
            token_bytes=self._token_bytes,
            fixed_bytes=self._fixed_bytes,
            dtype=self.dtype,
            device=self._device,
        )

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks of a request with this number of tokens."""
        return max(1, self.fixed_blocks + (-(-tokens // BLOCK_TOKENS) if self._token_bytes else 0))

    def new_cache(self, prefix: Sequence[int] = ()) -> StateCache:
        if prefix:
            raise ValueError("the state of a request cannot start from another's blocks")
        return StateCache(self)


class StateCache(KVCache):
    """The state of one request's tokens; ``GeneralForward`` computes it.

    Attributes:
        row: The state; None if it must be recomputed from the tokens.
        ids: The tokens so far.
        pictures: The picture features of these tokens, as ``(start, rows)``; row 0 is token ``start``.
    """

    pool: StatePool

    def __init__(self, pool: StatePool) -> None:
        super().__init__(pool, array("i"), 0)
        self.row: StateRow | None = None
        self.ids: list[int] = []
        self.pictures: list[tuple[int, EmbeddedRows]] = []

    def drop_unfinished(self) -> None:
        """Drop the tokens of a step in which a later forward pass failed, so that they are not computed twice."""
        if len(self.ids) != self.length:
            del self.ids[self.length :]
            self.pictures = [(start, rows) for start, rows in self.pictures if start < self.length]
            self.row = None

    def reserve(self, tokens: int) -> bool:
        if tokens <= 0:
            return True
        blocks = self.pool.take(max(0, self.pool.blocks_for(self.length + tokens) - len(self.blocks)))
        if blocks is None:
            return False
        self.blocks.extend(blocks)
        return True

    def truncate(self, length: int) -> None:
        if length != self.length:
            raise ValueError("the state of a request cannot be truncated")

    def branch(self) -> StateCache:
        from gym_fed.serving.forward.model_states import copied

        branch = self.pool.new_cache()
        if not branch.reserve(self.length):
            raise no_room(self.length)
        branch.length, branch.ids, branch.pictures = self.length, [*self.ids], [*self.pictures]
        branch.row = None if self.row is None else copied(self.row, self.length)
        return branch

    def release(self) -> None:
        super().release()
        self.row, self.ids, self.pictures = None, [], []
