"""Updates that are closer to each other than honest work of their round is, so that they are paid as one.

How close honest updates are depends on the model, the data and the steps; a round tells it of itself: the median of all
pairs is its background b, and a pair is beyond it by (cosine - b) / (1 - b). Two halves of one update, cut by
coordinates, have a cosine of nothing; they are told by what they leave out. (This project.)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.similarity import Matrix
from gym_fed.soup.stacks import stacks_of
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack
from gym_fed.soup.stacks.factors import FactorStack
from gym_fed.soup.stacks.signs import SignStack

_DENSE = 0.9
_OF_CHANCE = 0.1
_LEAST_BY_CHANCE = 30.0


def beyond(cosines: Matrix, each: bool = False) -> Matrix:
    """``[n, n]`` how far pairs are beyond the round's background: 1 for equals, 0 for a pair like the median one.

    Args:
        cosines: ``[n, n]`` of whole updates.
        each: Whether the background of a pair is at least the median of what each of the two has with all others.
            Unlike noise from a third of the round pushes the median of all pairs down; this one, not until it is half.
    """
    n = len(cosines)
    if n < 2:
        return np.asarray(cosines)
    pairs = [float(cosines[i, j]) for i in range(n) for j in range(i + 1, n)]
    background = np.full((n, n), statistics.median_low(pairs))
    if each:
        own = [statistics.median_low([float(c) for c in np.delete(cosines[i], i)]) for i in range(n)]
        background = np.maximum(background, np.maximum.outer(own, own))
    background = np.clip(background, 0.0, 1.0 - 1e-6)
    return np.asarray((cosines - background) / (1.0 - background))


def groups_of(links: Matrix, threshold: float) -> list[list[int]]:
    """Those who are paid as one, everybody in one group: two groups are joined while all pairs of both are linked.

    The closest first (complete linkage), so that one who is between everybody does not make one of all.

    Args:
        links: ``[n, n]`` how strongly two are linked.
        threshold: From where on they are.
    """
    groups = [[i] for i in range(len(links))]
    while True:
        joins = [
            (-float(links[np.ix_(one, other)].min()), a, b)
            for a, one in enumerate(groups)
            for b, other in enumerate(groups[:a])
        ]
        strength, a, b = min(joins, default=(0.0, 0, 0))
        if not joins or -strength < threshold:
            return groups
        groups[b] = sorted(groups[b] + groups.pop(a))


def torn_apart(updates: Sequence[DeltaFile], spec: BaseSpec) -> NDArray[np.bool_]:
    """``[n, n]``: pairs of which neither is dense, and that have next to no weight in common.

    Less than a tenth of what two of their densities have by chance: sparse updates made apart overlap more than that.

    Args:
        updates: Open deltas of models shaped like ``spec``.
        spec: The base.
    """
    n = len(updates)
    common, size = np.zeros((n, n)), 0
    for stack in stacks_of(updates, spec):
        common += _common(stack)
        size += stack.rows * stack.cols
        stack.release()
    density = common.diagonal() / max(1, size)
    sparse = (density > 0.0) & (density < _DENSE)
    chance = size * np.outer(density, density)
    apart = np.outer(sparse, sparse) & (chance >= _LEAST_BY_CHANCE) & (common < _OF_CHANCE * chance)
    return np.asarray(apart & ~np.eye(n, dtype=bool))


def _common(stack: Stack) -> Matrix:
    """``[n, n]`` weights of a tensor in which both of a pair are not zero."""
    if isinstance(stack, SignStack):
        held = torch.stack([scales.reshape(-1) != 0 for scales in stack.scales]).to(torch.float64)
        return np.asarray((held @ held.T).numpy() * (stack.rows * stack.cols / held.shape[1]))
    if isinstance(stack, FactorStack):
        rows, cols = torch.zeros(len(stack.updates), stack.rows), torch.zeros(len(stack.updates), stack.cols)
        for i, factors in enumerate(stack.factors):
            if factors is not None:
                rows[i], cols[i] = (factors.b != 0).any(1), (factors.a != 0).any(0)
        return np.asarray(((rows @ rows.T) * (cols @ cols.T)).to(torch.float64).numpy())
    held_stack = _Held(stack.name, stack.updates, stack.shape)
    return held_stack.common()


class _Held(DecodedStack):
    """A tensor of all updates, decoded block by block."""

    def common(self) -> Matrix:
        found = np.zeros((len(self.updates), len(self.updates)))
        for _, block in self._blocks():
            held = (block != 0.0).to(torch.float32)
            found += (held @ held.T).to(torch.float64).numpy()
        return found
