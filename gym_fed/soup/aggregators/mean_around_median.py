"""Mean around the median, coordinate-wise.

Xie et al. 2018, "Generalized Byzantine-tolerant SGD", definition 5 (also "meamed"). Each coordinate is the mean of the
n - f values nearest to its median; of two values at the same distance, the smaller one counts as nearer. It tolerates f
malicious clients out of n >= 2f + 1. A malicious value within the honest spread is averaged in, so a coordinate may
leave the honest values by up to their spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import kernels
from gym_fed.soup.aggregator import CoordinateRule

if TYPE_CHECKING:
    from torch import Tensor


class MeanAroundMedian(CoordinateRule):
    name = "mean_around_median"
    robust = True

    def formula(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of the ``n - f`` values nearest to the median."""
        values, n = updates.sort(dim=0).values, len(updates)
        median = (values[(n - 1) // 2] + values[n // 2]) / 2
        nearest = (values - median).abs().argsort(dim=0, stable=True)[: n - self.num_malicious_nodes]
        return values.gather(0, nearest).mean(dim=0)

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        return kernels.mean_around_median(updates.contiguous(), len(updates) - self.num_malicious_nodes)
