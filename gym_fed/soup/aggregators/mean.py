"""The plain mean, one vote per contributor. A single malicious client can move it anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import Floats, Integers, WeightRule
from gym_fed.soup.gram import GramMatrix, Needs

if TYPE_CHECKING:
    from torch import Tensor


class Mean(WeightRule):
    name = "mean"
    robust = False
    needs = Needs.NOTHING
    bounds_one = True
    counts_votes = True

    def drops(self, weights: Tensor) -> int | None:
        return 0

    def of_votes(self, totals: Integers, voters: int, vote: float, *, noised: bool) -> Floats:
        """Return the mean vote."""
        return totals.astype(np.float64) * (vote / voters)

    def weigh(self, gram: GramMatrix) -> Tensor:
        return torch.full((gram.count,), 1.0 / gram.count, dtype=torch.float64)
