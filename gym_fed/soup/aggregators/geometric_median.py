"""Geometric median: the point whose distances to the updates have the smallest weighted sum, found to the end.

Pillutla et al. 2022, "Robust Aggregation for Federated Learning" (RFA), equation 4, with the step of Weiszfeld 1937::

    v = argmin_v sum_i w_i |x_i - v|
    v <- sum_i (w_i / |x_i - v|) x_i / sum_i (w_i / |x_i - v|)

It withstands malicious clients of less than half of the weight. For L of W the result is no farther from the honest
mean than ``2 (W - L) / (W - 2L)`` times the honest updates' mean distance to it (by the triangle inequality).

RFA stops after a few such steps on smoothed distances, ByzFL after three; how far that is from the median depends on
the data. Here the search takes Newton's steps where they descend (``linalg/spatial_median.py``), and ends when the
gradient of the mean distance is below ``tolerance``: the mean distance is then within ``tolerance`` times the remaining
distance of the smallest possible. An update may itself be the median, where there is no gradient: that is decided first
and exactly (Vardi and Zhang 2000, "The multivariate L1-median and associated data depth", equation 2.7). Distances are
smoothed by the rounding error of a distance alone, 1e-7 of an update's norm or less. Where many points are medians (an
even number of updates on one line), it is the middle of those updates that are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gym_fed.core.lazy_torch import torch
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.linalg.gram import GramMatrix
from gym_fed.soup.linalg.spatial_median import spatial_median

if TYPE_CHECKING:
    from torch import Tensor


class GeometricMedianConfig(AggregatorConfig):
    tolerance: Annotated[float, Field(ge=1e-12, le=1e-2)] = 1e-8
    """Largest gradient of the mean distance, which is 1 far from all updates and 0 at the median."""

    max_iterations: Annotated[int, Field(ge=1)] = 500
    """Steps after which the search is given up with an error; a few dozen is usual."""


class GeometricMedian(WeightRule):
    name = "geometric_median"
    robust = True
    weighted = True
    majority = True
    Config = GeometricMedianConfig
    config: GeometricMedianConfig

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Raises ``INTERNAL`` when ``max_iterations`` are too few."""
        weights = gram.weights.numpy()
        found = spatial_median(
            gram.products.numpy(), weights, self.config.tolerance, self.config.max_iterations
        )
        return torch.from_numpy(found)
