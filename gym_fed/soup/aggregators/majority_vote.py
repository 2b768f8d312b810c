"""Majority vote on signs, scaled by the median magnitude.

Bernstein et al. 2019, "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", algorithm 1, with
weighted votes, times the weighted median of the coordinate's magnitudes::

    sign(sum_i w_i sign(x_i)) * median_i |x_i|

A vote alone has no scale (the paper uses its learning rate); no minority can move the median magnitude beyond the
honest ones. Sign deltas of one scale give a sign delta of that scale.

An exact tie counts as plus, as in the sign codec, whose bits have no zero; a zero votes for neither sign. In a sum of
votes without noise a tie gives zero (``of_votes``). The rule tolerates malicious clients with less than half of the
weight: they can flip the sign of a coordinate on which honest updates disagree, but never raise its size above the
largest honest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy import torch
from gym_fed.soup import signs
from gym_fed.soup.aggregator import CoordinateRule, Floats, Integers
from gym_fed.soup.aggregators.median import weighted_median

if TYPE_CHECKING:
    from torch import Tensor


class MajorityVote(CoordinateRule):
    name = "majority_vote"
    robust = True
    weighted = True
    majority = True
    counts_votes = True

    def of_votes(self, totals: Integers, voters: int, vote: float, *, noised: bool) -> Floats:
        """Return the sign of the sum. A tie gives zero, but under noise it counts as plus."""
        if noised:
            return np.where(totals < 0, -vote, vote)
        return np.sign(totals).astype(np.float64) * vote

    def combine_signs(self, bits: Sequence[Tensor], strengths: Tensor, weights: Tensor, out: Tensor) -> bool:
        """Count weighted votes if every combined vector is a single update; every result has the median magnitude."""
        count = len(weights)
        if strengths.shape != (count, count) or torch.count_nonzero(strengths - strengths.diag().diag()):
            return False
        own = strengths.diagonal().to(torch.float32)
        votes = torch.where(own == 0, 0.0, weights / weights.min())
        if bool((votes != votes.round()).any()) or float(votes.sum()) >= 1 << 31 or bool((own < 0).any()):
            return False
        magnitude = float(weighted_median(own[:, None], weights))
        signs.majority(bits, votes.to(torch.int32), magnitude, out)
        return True

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        votes = torch.zeros(updates.shape[1], dtype=torch.float64)
        for update, weight in zip(updates, weights.tolist(), strict=True):
            votes.add_(torch.sign(update), alpha=weight)
        magnitude = weighted_median(updates.abs(), weights)
        return torch.where(votes < 0, -magnitude, magnitude)
