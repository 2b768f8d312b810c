"""Mean around the median, coordinate by coordinate.

Xie et al. 2018, "Generalized Byzantine-tolerant SGD", definition 5 (also "meamed"): each coordinate is the mean of the
n - f values nearest to its median, ties in distance going to the smaller value. It withstands f liars of n >= 2f + 1;
a liar within the honest spread is averaged in, so that a coordinate may leave the honest values by up to their spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gym_fed.soup.aggregator import CoordinateRule


class MeanAroundMedian(CoordinateRule):
    name = "mean_around_median"
    robust = True

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        return mean_around_median(updates, len(updates) - self.num_malicious_nodes)


def mean_around_median(rows: Tensor, keep: int) -> Tensor:
    """At each coordinate the mean of the ``keep`` values nearest to the median.

    Args:
        rows: ``[m, d]`` float32.
        keep: From 1 to m.

    Returns:
        ``[d]`` float32.
    """
    values = rows.sort(dim=0).values.to(torch.float64)
    count = len(values)
    median = (values[(count - 1) // 2] + values[count // 2]) / 2
    first = torch.zeros(rows.shape[1], dtype=torch.int64)
    reach = torch.full_like(median, float("inf"))
    for start in range(
        count - keep + 1
    ):  # sorted, the nearest are neighbours: the first window of least reach
        found = torch.maximum(median - values[start], values[start + keep - 1] - median)
        first[found < reach] = start
        reach = torch.minimum(reach, found)
    total = torch.zeros_like(median)
    for rank, value in enumerate(values):
        total += torch.where((rank >= first) & (rank < first + keep), value, 0.0)
    return (total / keep).to(torch.float32)
