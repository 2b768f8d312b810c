"""Centred clipping: a mean of clipped differences to the last estimate, repeated.

Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", algorithm 2. From v = 0,
``iterations`` times::

    v <- v + (1/n) sum_i (x_i - v) min(1, radius / |x_i - v|)

The paper starts from the last round's result. Updates are deltas here, so it starts from zero, and a round can be
reproduced on its own. Without ``radius``, every step uses the median distance to v (the lower of the middle two for an
even number). Fewer than half of the contributors cannot move it beyond honest distances. The paper leaves the radius
open; ByzFL uses 100.

With f malicious clients out of n >= 2f + 1, the result is bounded by honest norms. It is near the honest mean m for
f < n / 4: ``|v - m| <= R n / (n - 4f)`` in the limit, for R the largest honest distance to m. (Each step reduces the
distance by at least a share (n / 2 - 2f) / n of it, since half of the updates count in full.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.gram import GramMatrix, dot, symmetric_times

if TYPE_CHECKING:
    from torch import Tensor


class CentredClippingConfig(AggregatorConfig):
    radius: Annotated[float, Field(gt=0)] | None = None
    """Distance from v up to which an update counts in full; the median distance if absent."""

    iterations: Annotated[int, Field(ge=1, le=1000)] = 10
    """Number of steps."""


class CentredClipping(WeightRule):
    name = "centred_clipping"
    robust = True
    Config = CentredClippingConfig
    config: CentredClippingConfig

    def weigh(self, gram: GramMatrix) -> Tensor:
        products, count = gram.products.numpy(), gram.count
        squares = products.diagonal()
        centre = np.zeros(count)  # the coefficients of v
        for _ in range(self.config.iterations):
            along = symmetric_times(products, centre)
            distances = np.sqrt((squares - 2.0 * along + dot(centre, along)).clip(min=0.0))
            radius = self.config.radius
            if radius is None:
                radius = float(sorted(distances.tolist())[(count - 1) // 2])
            shares = [1.0 if far <= radius else radius / far for far in distances.tolist()]
            centre = centre * (1.0 - math.fsum(shares) / count) + np.array(shares) / count
        return torch.from_numpy(centre)
