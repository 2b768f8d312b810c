"""The plain mean: one contributor, one vote. One liar moves it anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.geometry import Geometry, Needs


class Mean(WeightRule):
    name = "mean"
    robust = False
    needs = Needs.NOTHING

    def weigh(self, geometry: Geometry) -> Tensor:
        return torch.full((geometry.count,), 1.0 / geometry.count, dtype=torch.float64)
