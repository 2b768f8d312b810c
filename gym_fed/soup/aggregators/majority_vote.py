"""Majority vote on signs, at the magnitude of the middle.

Bernstein et al. 2019, "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", algorithm 1: the sign
of a coordinate is what most updates say, by weight. A vote alone has no scale (the paper's is its learning rate); here
it is the weighted median of the coordinate's magnitudes, which no minority can move beyond the honest ones. Sign deltas
of one scale give a sign delta of that scale.

An exact tie counts as plus, as in the sign codec, whose bits know no zero; a zero votes for neither side. It withstands
liars of less than half of the weight: they may turn the sign of a coordinate on which honest updates disagree, never
its size beyond the largest honest one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gym_fed.soup.aggregator import CoordinateRule
from gym_fed.soup.aggregators.median import weighted_median
from gym_fed.soup.votes import refuse_half


class MajorityVote(CoordinateRule):
    name = "majority_vote"
    robust = True
    weighted = True

    def check(self, weights: Tensor) -> None:
        """Also refuses weights with which the f heaviest contributors would hold half of the vote."""
        super().check(weights)
        refuse_half(weights, self.num_malicious_nodes)

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        votes = torch.zeros(updates.shape[1], dtype=torch.float64)
        for update, weight in zip(updates, weights.tolist(), strict=True):
            votes.add_(torch.sign(update), alpha=weight)
        magnitude = weighted_median(updates.abs(), weights)
        return torch.where(votes < 0, -magnitude, magnitude)
