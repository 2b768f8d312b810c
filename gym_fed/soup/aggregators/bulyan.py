"""Bulyan: repeated Krum selection, then a mean around the median of each coordinate.

El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium", section 4 (Bulyan of Krum).
First, n - 2f updates are selected one at a time, each by Krum among the remaining ones. Then every coordinate is the
mean of the n - 4f selected values nearest to their median (``mean_around_median``). It tolerates f malicious clients
out of n >= 4f + 3, including those that hide a large change of a few coordinates in an update close to the others.

The last selections see fewer than f + 3 updates, for which Krum is not defined; one neighbour is counted there. Two
updates that are each other's nearest then score the same, and the one nearer to all the others is selected first.
Flower 1.41 uses one round of Multi-Krum instead of n - 2f rounds of Krum, which selects a different set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy import kernels, torch
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs

if TYPE_CHECKING:
    from torch import Tensor


class Bulyan(Aggregator):
    name = "bulyan"
    robust = True
    coordinate_wise = True
    needs = Needs.PRODUCTS

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """Return 4f + 3, or 1 if f = 0."""
        return 4 * malicious + 3 if malicious else 1

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        """Return the selected updates, in the order of contributors."""
        theta = gram.count - 2 * self.num_malicious_nodes
        selected = _repeated_krum(gram.squared_distances().numpy(), theta, self.num_malicious_nodes)
        matrix = torch.zeros(theta, gram.count, dtype=torch.float64)
        matrix[torch.arange(theta), torch.tensor(selected)] = 1.0
        return CombinationWeights(matrix, torch.ones(theta, dtype=torch.float64))

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return kernels.mean_around_median(rows.contiguous(), len(rows) - 2 * self.num_malicious_nodes)


def _repeated_krum(squared_distances: np.ndarray, theta: int, malicious: int) -> list[int]:
    """Return the ``theta`` selected indices, ascending. Distances are sorted only once."""
    left = np.arange(len(squared_distances))
    if theta == len(left):
        return left.tolist()
    others = squared_distances.copy()
    np.fill_diagonal(others, np.inf)
    order = np.argsort(others, axis=1, kind="stable")[:, :-1].astype(np.int32)
    nearest = np.take_along_axis(others, order, axis=1)
    for _ in range(theta):
        neighbours = max(1, len(left) - malicious - 2)
        scores = nearest[:, :neighbours].sum(axis=1)
        lowest = np.nonzero(scores == scores.min())[0]
        winner = int(lowest[np.argmin(nearest[lowest].sum(axis=1))])
        stays = order != left[winner]
        stays[winner] = False
        shape = (len(left) - 1, len(left) - 2)
        order, nearest = order[stays].reshape(shape), nearest[stays].reshape(shape)
        left = np.delete(left, winner)
    return sorted(set(range(len(squared_distances))) - set(left.tolist()))
