"""Attention of many short texts in one product, each a row of a padded batch: for evaluation, where no request waits.

A packed step attends to one cache after the other, as requests come and go. Texts that are scored, and answers that are
all written at the same pace, need no such freedom. Linear layers see real tokens only; padding is in the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class BatchAttention(Protocol):
    """Attention of one forward, layer by layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """``[tokens, heads, dim]`` of query ``[heads, tokens, dim]`` and key and value ``[kv_heads, tokens, dim]``."""


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
        """``[batch, heads, longest, dim]`` of ``[heads, tokens, dim]``."""
        return packed[:, self.rows].transpose(0, 1)

    def attended(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention of packed queries to padded keys, packed again: ``[tokens, heads, dim]``."""
        found = _grouped(self.fill(query), keys, values, mask, scale)
        heads, dim = found.shape[1], found.shape[3]
        return found.transpose(1, 2).reshape(-1, heads, dim)[self.places]


class BatchCache:
    """Keys and values of texts that grow together, one row each of ``[texts, kv_heads, capacity, dim]`` a layer.

    Args:
        lengths: Tokens of each text at first.
        capacity: Most tokens of a text.
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
        """For a forward of all tokens of the texts ``[first, last)``."""
        return _Prefill(self, first, last)

    def next_token(self) -> BatchAttention:
        """For a forward of one more token of every text, which is counted in ``lengths``."""
        self.lengths = self.lengths + 1
        return _NextToken(self)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these texts only."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = self.lengths[list(rows)]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (keys[index], values[index])

    def held(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; ``like`` has its ``[kv_heads, ..., dim]``."""
        if layer not in self._layers:
            shape = (len(self.lengths), like.shape[0], self._capacity, like.shape[-1])
            # Zeros, as padding that is hidden must still be numbers.
            made = [torch.zeros(shape, dtype=like.dtype, device=self._device) for _ in range(2)]
            self._layers[layer] = (made[0], made[1])
        return self._layers[layer]

    def mask(self, seen: np.ndarray) -> Tensor:
        """0 where ``seen``, -inf elsewhere; broadcast over heads."""
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
    """Attention of ``[batch, heads, tokens, dim]``; heads that share a key head lie along the tokens."""
    batch, heads, tokens, dim = query.shape
    groups = heads // keys.shape[1]
    stacked = query.reshape(batch, keys.shape[1], groups * tokens, dim)
    found = functional.scaled_dot_product_attention(
        stacked, keys, values, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale
    )
    return found.reshape(batch, heads, tokens, found.shape[-1])


def mask_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """``[batch, 1, queries, keys]``."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))[
        :, None
    ]
