"""Attention of many short texts as rows of one padded batch, for evaluation, where no request waits.

A packed step attends to one cache after the other, since requests come and go. Scored texts and answers generated in
lockstep start and advance together, so one batched attention serves them all. Linear layers see real tokens only;
only attention is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class BatchAttention(Protocol):
    """The attention of one forward, layer by layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return ``[tokens, heads, dim]`` for ``query [heads, tokens, dim]``; key and value have ``kv_heads``."""


class _Padded:
    """Packed tokens as rows of a batch, the shorter ones padded on the right."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        longest = max(counts)
        ends = np.cumsum(counts)
        column = np.arange(longest)
        starts = (ends - np.asarray(counts))[:, None]
        inside = column[None, :] < np.asarray(counts)[:, None]
        self.longest = longest
        self.rows = torch.from_numpy(np.where(inside, starts + column, 0)).to(device)
        self.places = torch.from_numpy(np.flatnonzero(inside)).to(device)

    def fill(self, packed: Tensor) -> Tensor:
        """Return ``[batch, heads, longest, dim]`` from ``[heads, tokens, dim]``."""
        return packed[:, self.rows].transpose(0, 1)

    def attended(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attend packed queries to padded keys, and pack the result: ``[tokens, heads, dim]``."""
        output = _grouped(self.fill(query), keys, values, mask, scale)
        heads, dim = output.shape[1], output.shape[3]
        return output.transpose(1, 2).reshape(-1, heads, dim)[self.places]


class BatchCache:
    """Keys and values of texts that grow in lockstep, each a row of ``[texts, kv_heads, capacity, dim]`` per layer.

    Args:
        lengths: The initial number of tokens of each text.
        capacity: Maximum number of tokens of a text.
        dtype: The model's dtype.
        device: The model's device.
    """

    def __init__(
        self, lengths: Sequence[int], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.lengths = np.asarray(lengths)
        self._capacity, self._dtype, self._device = capacity, dtype, device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def prefill(self, first: int, last: int) -> BatchAttention:
        """Return the attention of a forward of all tokens of the texts ``[first, last)``."""
        return _Prefill(self, first, last)

    def next_token(self) -> BatchAttention:
        """Return the attention of a forward of one more token per text, which is counted in ``lengths``."""
        self.lengths = self.lengths + 1
        return _NextToken(self)

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with these texts only."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = self.lengths[list(rows)]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (keys[index], values[index])

    def held(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer; ``like [kv_heads, ..., dim]`` gives their sizes and dtype."""
        if layer not in self._layers:
            shape = (len(self.lengths), like.shape[0], self._capacity, like.shape[-1])
            # Zeros, since padding that is masked must still be finite.
            made = [torch.zeros(shape, dtype=like.dtype, device=self._device) for _ in range(2)]
            self._layers[layer] = (made[0], made[1])
        return self._layers[layer]

    def mask(self, seen: np.ndarray) -> Tensor:
        """Return a mask of 0 where ``seen`` and -inf elsewhere; broadcast over heads."""
        return mask_of(torch.from_numpy(seen).to(self._device), self._dtype)

    @property
    def device(self) -> torch.device:
        return self._device


class _Prefill:
    def __init__(self, cache: BatchCache, first: int, last: int) -> None:
        self._cache, self._first, self._last = cache, first, last
        self._padded = _Padded([int(count) for count in cache.lengths[first:last]], cache.device)
        longest = self._padded.longest
        self._mask = cache.mask(np.tri(longest, dtype=bool)[None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._padded.fill(key), self._padded.fill(value)
        held = self._cache.held(layer, key)
        held[0][self._first : self._last, :, : self._padded.longest] = keys
        held[1][self._first : self._last, :, : self._padded.longest] = values
        return self._padded.attended(query, keys, values, self._mask, scale)


class _NextToken:
    def __init__(self, cache: BatchCache) -> None:
        self._cache = cache
        self._longest = int(cache.lengths.max())
        self._mask = cache.mask((np.arange(self._longest) < cache.lengths[:, None])[:, None, :])
        self._rows = torch.arange(len(cache.lengths), device=cache.device)
        self._at = torch.from_numpy(cache.lengths - 1).to(cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        held = self._cache.held(layer, key)
        held[0][self._rows, :, self._at] = key.transpose(0, 1)
        held[1][self._rows, :, self._at] = value.transpose(0, 1)
        keys, values = held[0][:, :, : self._longest], held[1][:, :, : self._longest]
        return _grouped(query.transpose(0, 1)[:, :, None], keys, values, self._mask, scale)[:, :, 0]


def _grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend for ``[batch, heads, tokens, dim]``; heads that share a key head are stacked along the tokens."""
    batch, heads, tokens, dim = query.shape
    groups = heads // keys.shape[1]
    stacked = query.reshape(batch, keys.shape[1], groups * tokens, dim)
    output = functional.scaled_dot_product_attention(
        stacked, keys, values, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale
    )
    return output.reshape(batch, heads, tokens, output.shape[-1])


def mask_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask ``[batch, 1, queries, keys]``."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[
        :, None
    ]
