"""Attention for evaluation: over texts as rows of a padded batch, and over trees of tokens.

A packed step attends to one cache after the other, since its requests change. In evaluation, scored texts and answers
generated in lockstep advance together, so one batched product serves them all. Only attention is padded; linear layers
see only real tokens.

In a tree, a token attends to itself and its ancestors, so most pairs are masked: sibling branches, and later tokens. A
tree is therefore cut into runs of tokens, each with only the keys that one of its tokens attends to. Runs of similar
sizes form one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class BatchAttention(Protocol):
    """The attention of one forward pass, layer by layer."""

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
    """The keys and values of texts that grow in lockstep, each a row of ``[texts, kv_heads, capacity, dim]`` per layer.

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
        """Return the attention of a forward pass over all tokens of the texts ``[first, last)``."""
        return _Prefill(self, first, last)

    def next_token(self) -> BatchAttention:
        """Return the attention of a forward pass over one more token per text, and count it in ``lengths``."""
        self.lengths = self.lengths + 1
        return _NextToken(self)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all texts but these."""
        index = torch.tensor(rows, device=self._device)
        self.lengths = self.lengths[list(rows)]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (keys[index], values[index])

    def held(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer; ``like [kv_heads, ..., dim]`` gives their sizes and dtype."""
        if layer not in self._layers:
            shape = (len(self.lengths), like.shape[0], self._capacity, like.shape[-1])
            # Zeros, since padding must be finite although it is masked.
            buffers = [torch.zeros(shape, dtype=like.dtype, device=self._device) for _ in range(2)]
            self._layers[layer] = (buffers[0], buffers[1])
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
    """Attend for ``[batch, heads, tokens, dim]``, with heads that share a key head stacked along the tokens."""
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


_MAX_RUN = 64
"""Maximum number of tokens of a run. In a text without branches, about half of the pairs within a run are masked."""
_MIN_RUN = 16
"""Branches up to this length are merged into one run with the next ones."""
_PRODUCT_PAIRS = 4096
"""Cost of an additional product, in token pairs whose attention takes equally long."""


@dataclass(frozen=True)
class _Run:
    """The tokens ``[start, stop)``, the keys that any of them attends to, and the mask ``[tokens, keys] bool``."""

    start: int
    stop: int
    keys: np.ndarray
    visible: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        return self.visible.shape[0], self.visible.shape[1]


@dataclass(frozen=True)
class _Product:
    """Runs padded to one product: token indices ``[runs, queries]`` and ``[runs, keys]``, and their mask."""

    queries: Tensor
    keys: Tensor
    mask: Tensor
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask_for(self, groups: int) -> Tensor:
        """Return the mask for ``groups`` heads that are stacked along the tokens."""
        if groups not in self._masks:
            self._masks[groups] = self.mask.repeat(1, 1, groups, 1)
        return self._masks[groups]


class TreeAttention:
    """The attention of several trees in one forward pass.

    Args:
        visible: For each tree, ``[tokens, tokens] bool``: the tokens (columns) that a token (row) attends to.
        dtype: The model's dtype.
        device: The model's device.
    """

    def __init__(self, visible: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> None:
        runs: list[_Run] = []
        first = 0
        for mask in visible:
            runs += [_run(mask, start, stop, first) for start, stop in _cuts(mask)]
            first += len(mask)
        self._products: list[_Product] = []
        order = np.zeros(first, dtype=np.int64)
        done = 0
        for group in _groups(runs):
            self._products.append(_product(group, dtype, device))
            most = self._products[-1].queries.shape[1]
            for number, run in enumerate(group):
                order[run.start : run.stop] = done + number * most + np.arange(run.stop - run.start)
            done += len(group) * most
        self._order = torch.from_numpy(order).to(device)
        """The position of each token in the products' outputs."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See ``BatchAttention``."""
        del layer
        heads, tokens, dim = query.shape
        kv_heads, groups = len(key), heads // len(key)
        queries = query.transpose(0, 1).reshape(tokens, heads * dim)
        held = [run.transpose(0, 1).reshape(tokens, -1) for run in (key, value)]
        parts = []
        for run in self._products:
            runs, most = run.queries.shape
            # Heads that share a key head are stacked along the tokens.
            some = queries.index_select(0, run.queries.flatten()).view(runs, most, kv_heads, groups, dim)
            stacked = some.permute(0, 2, 3, 1, 4).reshape(runs, kv_heads, groups * most, dim)
            seen = run.keys.flatten()
            keys, values = (
                part.index_select(0, seen).view(*run.keys.shape, kv_heads, -1).transpose(1, 2)
                for part in held
            )
            output = functional.scaled_dot_product_attention(
                stacked, keys, values, attn_mask=run.mask_for(groups), scale=scale
            )
            apart = output.reshape(runs, kv_heads, groups, most, -1).permute(0, 3, 1, 2, 4)
            parts.append(apart.reshape(runs * most, -1))
        return torch.cat(parts).index_select(0, self._order).view(tokens, heads, -1)


def _cuts(visible: np.ndarray) -> list[tuple[int, int]]:
    """Cut a tree's tokens into runs, at tokens that do not follow the previous one, and where a run is too long."""
    follows = np.diagonal(visible, -1)
    starts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(visible)]
    cuts: list[tuple[int, int]] = []
    for start, stop in pairwise(starts):
        count = -(-(stop - start) // _MAX_RUN)
        ends = [start + (stop - start) * part // count for part in range(count + 1)]
        if cuts and stop - cuts[-1][0] <= _MIN_RUN:
            cuts[-1] = (cuts[-1][0], stop)
        else:
            cuts += pairwise(ends)
    return cuts


def _run(visible: np.ndarray, start: int, stop: int, first: int) -> _Run:
    """Return a run of a tree that begins at the token ``first`` of all trees."""
    keys = np.flatnonzero(visible[start:stop].any(axis=0))
    return _Run(first + start, first + stop, first + keys, visible[start:stop, keys])


def _groups(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Group runs into products, so that all products together have the fewest pairs, padding included."""
    order = sorted(runs, key=lambda run: run.size)
    sizes = np.array([run.size for run in order])
    least, begin = [0.0], [0]
    for stop in range(1, len(order) + 1):
        # for each possible first run of the last product
        most = np.maximum.accumulate(sizes[:stop][::-1], axis=0)[::-1]
        pairs = most.prod(axis=1) * np.arange(stop, 0, -1) + _PRODUCT_PAIRS + np.array(least)
        begin.append(int(pairs.argmin()))
        least.append(float(pairs.min()))
    groups: list[list[_Run]] = []
    stop = len(order)
    while stop:
        groups.append(order[begin[stop] : stop])
        stop = begin[stop]
    return groups


def _product(runs: Sequence[_Run], dtype: torch.dtype, device: torch.device) -> _Product:
    most = [max(run.size[axis] for run in runs) for axis in (0, 1)]
    queries, keys = (np.zeros((len(runs), count), dtype=np.int64) for count in most)
    seen = np.zeros((len(runs), *most), dtype=bool)
    for number, run in enumerate(runs):
        tokens, width = run.size
        queries[number, :tokens] = np.arange(run.start, run.stop)
        keys[number, :width] = run.keys
        seen[number, :tokens, :width] = run.visible
        seen[number, tokens:, 0] = True  # padding, since every row must see something
    return _Product(
        torch.from_numpy(queries).to(device),
        torch.from_numpy(keys).to(device),
        mask_of(torch.from_numpy(seen).to(device), dtype),
    )
