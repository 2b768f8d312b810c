"""Weighted mean (federated averaging).

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", alg. 1:
``sum_k (n_k / n) * w_k``, here on deltas. A single malicious client can move it anywhere, and has more weight the more
examples it claims.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.gram import GramMatrix, Needs

if TYPE_CHECKING:
    from torch import Tensor


class WeightedMean(WeightRule):
    name = "weighted_mean"
    robust = False
    weighted = True
    needs = Needs.NOTHING

    def weigh(self, gram: GramMatrix) -> Tensor:
        return gram.weights / math.fsum(gram.weights.tolist())
