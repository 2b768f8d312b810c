"""Group the updates of one round that are closer to each other than honest updates on different data are.

How close honest updates are depends on the model, the data and the steps, so each round is its own measure. Groups are
joined by average linkage, the closest two first, while all pairs of both are above the background b. At every step b
is the median cosine of the sums of all groups, each of which counts once, so that keys that are joined already do not
shift it; it is at least the median of what either group has with all others, which unlike noise from a third of the
round does not push down. A sum has less noise than its members, so noise on many keys does not make honest pairs look
close. The spread s is how far the pairs below the background lie below it (root mean square), since pairs of one
contributor's keys are above. Two groups are joined if the mean cosine c of their pairs is far enough above::

    (c - b) / (1 - b) >= min(threshold, max(LEAST_BEYOND, SPREADS s / (1 - b)))

(This project.)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gym_fed.soup.sybils.similarity import Matrix

LEAST_BEYOND = 0.12
"""Two are never joined below this: the spread of few pairs is easily too small by chance."""

SPREADS = 3.0
"""Spreads of honest pairs that two must be above the background, where ``threshold`` is not reached before."""

_MEASURED_PAIRS = 4
"""Pairs of groups from which a spread is measured; with fewer, only ``threshold`` joins."""


def groups_of(
    cosines: Matrix, torn: NDArray[np.bool_], threshold: float, each: bool = False
) -> list[list[int]]:
    """Group updates; every update is in exactly one group.

    Args:
        cosines: ``[n, n]`` of whole updates.
        torn: ``[n, n]`` pairs that look like one update cut in two, which are joined whatever their cosine.
        threshold: From here on two are joined even if honest pairs are spread far.
    """
    alike = np.where(torn, 1.0, cosines)
    groups = [[i] for i in range(len(alike))]
    while len(groups) > 1:
        mean = _mean_cosines(alike, groups)
        first, second = np.tril_indices(len(groups), -1)
        closest = int(np.argmax(mean[first, second]))
        a, b = int(first[closest]), int(second[closest])
        background, spread = _measured(_cosines_of_sums(cosines, groups)[first, second])
        background = max(background, _median_with_others(mean, a), _median_with_others(mean, b))
        beyond = (float(mean[a, b]) - background) / (1.0 - background)
        farthest = float(alike[np.ix_(groups[a], groups[b])].min())
        if farthest <= background or beyond < min(threshold, max(LEAST_BEYOND, SPREADS * spread)):
            break
        groups[b] = sorted(groups[b] + groups.pop(a))
    return groups


def _mean_cosines(cosines: Matrix, groups: list[list[int]]) -> Matrix:
    return np.array([[float(cosines[np.ix_(one, other)].mean()) for other in groups] for one in groups])


def _cosines_of_sums(cosines: Matrix, groups: list[list[int]]) -> Matrix:
    """``[g, g]`` cosines of the sums of each group's updates, scaled to one length."""
    products = np.array([[float(cosines[np.ix_(one, other)].sum()) for other in groups] for one in groups])
    lengths = np.sqrt(np.maximum(products.diagonal(), 1e-12))
    return np.asarray(products / np.outer(lengths, lengths))


def _measured(pairs: NDArray[np.float64]) -> tuple[float, float]:
    """The background of pairs, and their spread below it in units of 1 less the background."""
    median = float(np.sort(pairs)[(len(pairs) - 1) // 2])
    background = min(max(median, 0.0), 1.0 - 1e-6)
    if len(pairs) < _MEASURED_PAIRS:
        return background, math.inf
    below = pairs[pairs <= median]
    spread = math.sqrt(float(((median - below) ** 2).sum()) / max(1, len(below) - 1))
    return background, spread / (1.0 - background)


def _median_with_others(mean: Matrix, group: int) -> float:
    others = np.sort(np.delete(mean[group], group))
    return min(float(others[(len(others) - 1) // 2]), 1.0 - 1e-6)
