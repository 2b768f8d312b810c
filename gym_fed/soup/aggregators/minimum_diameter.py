"""Minimum diameter averaging (MDA): the mean of the n - f updates that lie closest together.

El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium" (Brute), after Rousseeuw 1985,
"Multivariate estimation with high breakdown point". It withstands f malicious clients of n >= 2f + 1: the result is
within 2f / (n - f) of the honest updates' diameter from their mean (Farhadkhani et al. 2022, "Byzantine Machine
Learning Made Easy by Resilient Averaging of Momentums", table 1).

The search is exact. n - f updates have a diameter below t exactly when f updates cover every pair farther apart than t.
A vertex cover of at most f is found in about 1.47^f steps (Chen et al. 2001, "Vertex Cover: Further Observations and
Further Improvements", whose first reductions are used). Trying the subsets, as ByzFL does, takes n over f. Where
several subsets have the smallest diameter, the next largest distance decides, and so on down: the result does not
depend on the order of contributors unless distances are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy_torch import torch
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.linalg.gram import GramMatrix
from gym_fed.soup.linalg.vertex_cover import Conflicts

if TYPE_CHECKING:
    from torch import Tensor

MAX_MALICIOUS = 20
"""The search grows exponentially with f; above this it is refused."""


class MinimumDiameter(WeightRule):
    name = "minimum_diameter"
    robust = True

    def check(self, weights: Tensor) -> None:
        """Also refuses searches that could not be finished."""
        if self.num_malicious_nodes > MAX_MALICIOUS:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"aggregator {self.name!r} searches exactly, for num_malicious_nodes up to {MAX_MALICIOUS}, "
                f"not {self.num_malicious_nodes}",
                "choose multi_krum, geometric_median or caf, or lower num_malicious_nodes",
            )
        super().check(weights)

    def weigh(self, gram: GramMatrix) -> Tensor:
        kept = _closest_together(gram.squared_distances(), self.num_malicious_nodes)
        coefficients = torch.zeros(gram.count, dtype=torch.float64)
        coefficients[kept] = 1.0 / len(kept)
        return coefficients


def _closest_together(squared_distances: Tensor, malicious: int) -> list[int]:
    """Indices of the n - f, ascending.

    Pairs are taken from the farthest down. A pair must be parted, one of it left out, wherever f omissions can still
    part all the pairs so far; where they cannot, both stay for good.
    """
    count = len(squared_distances)
    conflicts = Conflicts(malicious)
    if malicious:
        upper = torch.triu_indices(count, count, offset=1)
        farthest = squared_distances[upper[0], upper[1]].sort(descending=True, stable=True).indices
        for first, second in upper[:, farthest].T.tolist():
            if not conflicts.part(first, second) and conflicts.decided:
                break
    omitted = conflicts.omitted
    return [index for index in range(count) if index not in omitted]
