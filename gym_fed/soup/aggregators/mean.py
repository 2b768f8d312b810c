"""Weighted mean: federated averaging.

McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", alg. 1:
``sum_k (n_k / n) * w_k``, here on deltas. One liar moves it anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gym_fed.soup.aggregator import Aggregator


class Mean(Aggregator):
    name = "mean"
    robust = False

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Summed in float64, one contributor after the other: no reduction that threads could split."""
        shares = weights.to(torch.float64) / weights.to(torch.float64).sum()
        total = torch.zeros(updates.shape[1], dtype=torch.float64)
        for update, share in zip(updates, shares.tolist(), strict=True):
            total += update.to(torch.float64).mul_(share)
        return total.to(torch.float32)
