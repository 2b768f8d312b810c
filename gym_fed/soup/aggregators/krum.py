"""Krum: select the update that is nearest to its neighbours.

Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", section 4::

    score(i) = sum of |x_i - x_j|^2 over the n - f - 2 updates j nearest to x_i;   the lowest score wins

Ties go to the first in the order of contributors. Krum tolerates f malicious clients out of n >= 2f + 3. The result is
one contributor's update; the others have no effect.

Flower also counts n - f - 2 others; ByzFL 0.0.11 counts n - f - 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.gram import GramMatrix

if TYPE_CHECKING:
    from torch import Tensor


class Krum(WeightRule):
    name = "krum"
    robust = True

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """Return 2f + 3, or 1 if f = 0."""
        return 2 * malicious + 3 if malicious else 1

    def weigh(self, gram: GramMatrix) -> Tensor:
        coefficients = torch.zeros(gram.count, dtype=torch.float64)
        scores = krum_scores(gram.squared_distances(), self.num_malicious_nodes)
        coefficients[int(np.argmin(scores))] = 1.0
        return coefficients


def krum_scores(squared_distances: Tensor, malicious: int) -> list[float]:
    """Compute the Krum score of each update.

    Args:
        squared_distances: ``[n, n]`` float64, symmetric.
        malicious: Number of malicious clients, f. In rounds of fewer than f + 3, one neighbour is counted.

    Returns:
        The n scores, each a sum that is rounded once.
    """
    count = len(squared_distances)
    neighbours = min(max(1, count - malicious - 2), count - 1)
    others = squared_distances.numpy().copy()
    np.fill_diagonal(others, np.inf)
    others.sort(axis=1)
    return [math.fsum(row) for row in others[:, :neighbours].tolist()]
