"""Keys and values of one request, layer by layer, in buffers of its own that grow by doubling."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 16


class KVCache:
    """What a request has been read so far. ``MixedModel.new_cache`` makes one; only a step writes to it.

    Args:
        capacity_hint: Tokens for which memory is taken at first; more is taken when they are exceeded.
    """

    def __init__(self, capacity_hint: int = _SMALLEST) -> None:
        self._capacity = max(_SMALLEST, capacity_hint)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens read: the position of the next one."""
        return self._length

    @property
    def capacity(self) -> int:
        """Tokens that fit before the next growth."""
        return self._capacity

    @property
    def bytes(self) -> int:
        """Memory taken, the part that is not filled yet too."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def reserve(self, tokens: int) -> None:
        """See to it that so many more tokens fit."""
        wanted = self._length + tokens
        if wanted <= self._capacity:
            return
        while self._capacity < wanted:
            self._capacity *= 2
        for number, (keys, values) in self._layers.items():
            self._layers[number] = (self._grown(keys), self._grown(values))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new tokens' keys and values (``[kv_heads, new, dim]``) after what is there; room is reserved.

        They count as read when the step that wrote them is through (``advance``), so that a step that failed can be
        done again.

        Returns:
            All keys ``[kv_heads, length + new, dim]`` and values of the layer, as views.
        """
        held = self._layers.get(layer)
        if held is None:
            held = (self._empty(keys), self._empty(values))
            self._layers[layer] = held
        stop = self._length + keys.shape[1]
        held[0][:, self._length : stop] = keys
        held[1][:, self._length : stop] = values
        return held[0][:, :stop], held[1][:, :stop]

    def advance(self, tokens: int) -> None:
        """The step that wrote so many tokens is through."""
        self._length += tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from this position on.

        Raises:
            ValueError: For a position beyond the last.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"length {length} is not from 0 to {self._length}")
        self._length = length

    def _empty(self, like: Tensor) -> Tensor:
        heads, _, dim = like.shape
        return torch.empty(heads, self._capacity, dim, dtype=like.dtype, device=like.device)

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old)
        new[:, : self._length] = old[:, : self._length]
        return new
