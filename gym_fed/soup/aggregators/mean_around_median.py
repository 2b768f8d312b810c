"""Mean around the median, coordinate by coordinate.

Xie et al. 2018, "Generalized Byzantine-tolerant SGD", definition 5 (also "meamed"): each coordinate is the mean of the
n - f values nearest to its median, ties in distance going to the smaller value. It withstands f liars of n >= 2f + 1;
a liar within the honest spread is averaged in, so that a coordinate may leave the honest values by up to their spread.
"""

from __future__ import annotations

from gym_quant import kernels
from torch import Tensor

from gym_fed.soup.aggregator import CoordinateRule


class MeanAroundMedian(CoordinateRule):
    name = "mean_around_median"
    robust = True

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        return kernels.mean_around_median(updates.contiguous(), len(updates) - self.num_malicious_nodes)
