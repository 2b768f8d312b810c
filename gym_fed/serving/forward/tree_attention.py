"""Attention of token trees, in which each token sees itself and its ancestors.

Most pairs of a tree's tokens do not see each other: sibling branches, and later tokens. So a tree is cut into runs of
tokens, and each run is attended with only the keys that one of its tokens sees; runs of similar sizes are one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gym_fed.serving.forward.padded import mask_of

_MOST_RUN = 64
"""Tokens of a run. In a text without branches, about half of a run's pairs with itself are masked."""
_LEAST_RUN = 16
"""Branches up to this length are attended with the next ones."""
_PRODUCT_PAIRS = 4096
"""The number of token pairs whose attention takes as long as one more product."""


@dataclass(frozen=True)
class _Run:
    """The tokens ``[start, stop)``, the keys that one of them sees, and ``[tokens, keys] bool`` which sees which."""

    start: int
    stop: int
    keys: np.ndarray
    visible: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        return self.visible.shape[0], self.visible.shape[1]


@dataclass(frozen=True)
class _Product:
    """Runs padded to one product: numbers of tokens ``[runs, queries]`` and ``[runs, keys]``, and their mask."""

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
    """The attention of several trees in one forward.

    Args:
        visible: For each tree, ``[tokens, tokens] bool``: which tokens (columns) a token (row) sees.
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
    """Cut a tree's tokens into runs, where a token does not follow the one before it and where a run is too long."""
    follows = np.diagonal(visible, -1)
    starts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(visible)]
    cuts: list[tuple[int, int]] = []
    for start, stop in pairwise(starts):
        count = -(-(stop - start) // _MOST_RUN)
        ends = [start + (stop - start) * part // count for part in range(count + 1)]
        if cuts and stop - cuts[-1][0] <= _LEAST_RUN:
            cuts[-1] = (cuts[-1][0], stop)
        else:
            cuts += pairwise(ends)
    return cuts


def _run(visible: np.ndarray, start: int, stop: int, first: int) -> _Run:
    """Return a run of a tree whose first token is ``first`` of all."""
    keys = np.flatnonzero(visible[start:stop].any(axis=0))
    return _Run(first + start, first + stop, first + keys, visible[start:stop, keys])


def _groups(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Group runs into products: the parts of the sorted runs with the fewest pairs, padding included."""
    order = sorted(runs, key=lambda run: run.size)
    sizes = np.array([run.size for run in order])
    least, begin = [0.0], [0]
    for stop in range(1, len(order) + 1):
        # For each first run of the last part.
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
        seen[number, tokens:, 0] = True  # padding: no row may see nothing
    return _Product(
        torch.from_numpy(queries).to(device),
        torch.from_numpy(keys).to(device),
        mask_of(torch.from_numpy(seen).to(device), dtype),
    )
