"""Weighted coordinate-wise median.

Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", definition 1. The weighted
median is the value with half of the weight on either side, or the mean of the two middle values if half of the weight
is reached exactly between them. With equal weights it is the ordinary median.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import kernels, torch
from gym_fed.soup.aggregator import CoordinateRule

if TYPE_CHECKING:
    from torch import Tensor


class Median(CoordinateRule):
    name = "median"
    robust = True
    weighted = True
    majority = True
    bounds_one = True

    def formula(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of the first value that reaches half of the weight and the first that exceeds it."""
        values, order = updates.sort(dim=0, stable=True)
        reached = weights[order].cumsum(dim=0)
        half = reached[-1] / 2
        lower, upper = (reached < half).sum(dim=0), (reached <= half).sum(dim=0)
        return (values.gather(0, lower[None]) + values.gather(0, upper[None]))[0] / 2

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        return weighted_median(updates, weights)

    def drops(self, weights: Tensor) -> int | None:
        return (len(weights) - 1) // 2 if bool((weights == weights[0]).all()) else None


def weighted_median(rows: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted median of each coordinate; ``Median.formula`` is its definition.

    Args:
        rows: ``[m, d]`` float32.
        weights: ``[m]`` float64, positive.

    Returns:
        ``[d]`` float32.
    """
    if bool((weights == weights[0]).all()):
        return kernels.median(rows.contiguous())
    values, order = rows.T.contiguous().sort(dim=1, stable=True)
    reached = weights.to(torch.float64)[order].cumsum(dim=1)
    half = reached[:, -1:] / 2
    below = (reached < half).sum(dim=1, keepdim=True)
    upto = (reached <= half).sum(dim=1, keepdim=True)
    middle = values.gather(1, torch.cat([below, upto], dim=1)).to(torch.float64)
    return ((middle[:, 0] + middle[:, 1]) / 2).to(torch.float32)
