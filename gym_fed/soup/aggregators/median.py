"""Coordinate-wise median, weighted.

Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", definition 1.
With weights it is the value at which half the weight lies on either side, and the mean of the two middle
values where that happens between them; equal weights give the ordinary median.
"""

from __future__ import annotations

import torch
from gym_quant import kernels
from torch import Tensor

from gym_fed.soup.aggregator import CoordinateRule


class Median(CoordinateRule):
    name = "median"
    robust = True
    weighted = True
    majority = True
    bounds_one = True

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        return weighted_median(updates, weights)

    def drops(self, weights: Tensor) -> int | None:
        return (len(weights) - 1) // 2 if bool((weights == weights[0]).all()) else None


def weighted_median(rows: Tensor, weights: Tensor) -> Tensor:
    """At each coordinate the value at which half the weight lies on either side.

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
