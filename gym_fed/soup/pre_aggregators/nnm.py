"""NNM, nearest-neighbour mixing: replace every update with the mean of its nearest neighbours.

Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", algorithm 2. The nearest
are the n - f updates with the smallest distances, including the update itself; ties go to the first in the order of
contributors. NNM reduces the spread of honest updates, on which the error of every robust rule depends. With it,
trimmed mean, median, Krum and geometric median have order-optimal error. Here the mean is weighted, and each
combination has the weight of its own update; the paper and ByzFL have no weights.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.core.text import counted
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.pre_aggregator import PreAggregator
from gym_fed.soup.rule import RuleConfig


class NNMConfig(RuleConfig):
    num_neighbours: Annotated[int, Field(ge=1)] | None = None
    """Number of updates per mean, including the update itself; default and maximum: all but ``num_malicious_nodes``."""


class NNM(PreAggregator):
    name = "nnm"
    needs = Needs.PRODUCTS
    Config = NNMConfig
    config: NNMConfig

    def rows(self, count: int) -> int:
        """Return ``count``; refuse to mix more updates than are honest."""
        honest = count - self.num_malicious_nodes
        if (self.config.num_neighbours or 1) > honest:
            asked = self.config.num_neighbours
            mixed = "one update" if asked is None else f"num_neighbours: {asked}"
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"pre-aggregator 'nnm' with {mixed} and num_malicious_nodes: {self.num_malicious_nodes} needs "
                f"{counted((asked or 1) + self.num_malicious_nodes, 'update')}, not {count}",
                "wait for more contributors, or lower num_neighbours",
            )
        return count

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        count = self.rows(gram.count)
        neighbours = self.config.num_neighbours or count - self.num_malicious_nodes
        distances = gram.squared_distances().fill_diagonal_(-1.0)  # an update precedes its copies
        nearest = distances.sort(dim=1, stable=True).indices[:, :neighbours].sort(dim=1).values
        weights = gram.weights[nearest]
        totals = torch.zeros(count, dtype=torch.float64)
        for column in weights.T:
            totals += column
        matrix = torch.zeros(count, count, dtype=torch.float64)
        matrix.scatter_(1, nearest, weights / totals[:, None])
        return CombinationWeights(matrix, gram.weights)
