"""Geometric median: the point with the smallest weighted sum of distances to the updates, solved to a tolerance.

Pillutla et al. 2022, "Robust Aggregation for Federated Learning" (RFA), equation 4, with the step of Weiszfeld 1937::

    v = argmin_v sum_i w_i |x_i - v|
    v <- sum_i (w_i / |x_i - v|) x_i / sum_i (w_i / |x_i - v|)

It tolerates malicious clients with less than half of the weight. If they have L of W, the result is no farther from the
honest mean than ``2 (W - L) / (W - 2L)`` times the honest updates' mean distance to it (by the triangle inequality).

RFA stops after a few such steps on smoothed distances, ByzFL after three; how far that is from the median depends on
the data. Here the search takes Newton steps if they descend, and stops when the gradient of the mean distance is below
``tolerance``: the mean distance then exceeds the minimum by at most ``tolerance`` times the distance to the median. The
median may be one of the updates, where no gradient exists: this case is decided first and exactly (Vardi and Zhang
2000, "The multivariate L1-median and associated data depth", equation 2.7). Distances are smoothed only by the rounding
error of a distance, 1e-7 of an update's norm or less. If many points are medians (an even number of updates on one
line), the result is the mean of the updates among them.

The search uses only inner products. A point is a linear combination of the updates, measured from the medoid (the
update with the smallest sum of distances), so that a malicious client at 1e30, whose coefficient is about 1e-30, does
not cost the others precision. The Newton systems are solved by conjugate gradients in the same coefficients; if a step
does not descend, Weiszfeld's step is taken.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.gram import Array, GramMatrix, dot, symmetric_times

if TYPE_CHECKING:
    from torch import Tensor


class GeometricMedianConfig(AggregatorConfig):
    tolerance: Annotated[float, Field(ge=1e-12, le=1e-2)] = 1e-8
    """Largest gradient of the mean distance, which is 1 far from all updates and 0 at the median."""

    max_iterations: Annotated[int, Field(ge=1)] = 500
    """Maximum number of steps before the search fails with an error; a few dozen are usual."""


class GeometricMedian(WeightRule):
    name = "geometric_median"
    robust = True
    weighted = True
    majority = True
    Config = GeometricMedianConfig
    config: GeometricMedianConfig

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Weight the updates; raises ``INTERNAL`` if ``max_iterations`` is too low."""
        weights = gram.weights.numpy()
        coefficients = spatial_median(
            gram.products.numpy(), weights, self.config.tolerance, self.config.max_iterations
        )
        return torch.from_numpy(coefficients)


_EPSILON = float(np.finfo(np.float64).eps)


def spatial_median(products: Array, weights: Array, tolerance: float, max_iterations: int) -> Array:
    """Return the coefficients of the geometric median.

    Args:
        products: ``[n, n]`` float64 inner products.
        weights: ``[n]`` float64, positive.
        tolerance: Largest gradient of the weighted mean of distances.
        max_iterations: Maximum number of steps.

    Returns:
        ``[n]`` float64 that add up to one.

    Raises:
        GymError: ``INTERNAL`` if ``max_iterations`` steps do not suffice.
    """
    shares = weights / math.fsum(weights.tolist())
    squares = products.diagonal()
    tied = _medoids(products, shares)
    medoid = int(tied[0])
    gram = products - products[medoid] - products[medoid][:, None] + squares[medoid]
    gram[medoid] = gram[:, medoid] = 0.0
    search = _MedianSearch(gram, shares, 8.0 * _EPSILON * (squares + squares[medoid]))
    point = np.zeros(len(shares))
    point[tied] = 1.0 / len(tied)
    if search.is_at_medoid(point):
        start = search.leave_medoid(medoid, tolerance)
        if start is None:
            return _one_of(medoid, len(shares))
        point = start
    point = search.run(point, tolerance, max_iterations)
    point[medoid] += 1.0 - math.fsum(point.tolist())
    return point


class _MedianSearch:
    """Newton's method on coefficients ``[n]`` of vectors from the medoid, with inner products ``gram``."""

    def __init__(self, gram: Array, shares: Array, smoothing: Array) -> None:
        self.gram = gram
        self.shares = shares
        self.squares = gram.diagonal()
        self.smoothing = smoothing

    def is_at_medoid(self, point: Array) -> bool:
        return dot(point, symmetric_times(self.gram, point)) <= float(self.smoothing.min())

    def leave_medoid(self, medoid: int, tolerance: float) -> Array | None:
        """Take Vardi and Zhang's step away from a data point; return None if that point is the median."""
        apart = self.squares > self.smoothing
        pulls = np.where(apart, self.shares / np.sqrt(self.squares + self.smoothing + ~apart), 0.0)
        held = math.fsum(self.shares[~apart].tolist())
        pull = math.sqrt(max(0.0, dot(pulls, symmetric_times(self.gram, pulls))))
        if pull <= held + tolerance:
            return None
        step: Array = pulls * ((1.0 - held / pull) / math.fsum(pulls.tolist()))
        return step

    def run(self, point: Array, tolerance: float, max_iterations: int) -> Array:
        size = math.inf
        for _ in range(max_iterations):
            along = symmetric_times(self.gram, point)
            reaches = self._reaches(along, dot(point, along))
            pulls = self.shares / reaches
            total = math.fsum(pulls.tolist())
            gradient = total * point - pulls
            size = math.sqrt(max(0.0, dot(gradient, symmetric_times(self.gram, gradient))))
            if size <= tolerance:
                return point
            step = self._newton(point, along, reaches, gradient)
            if not self._descends(along, reaches, gradient, step):
                step = gradient / -total
            point = point + step
        raise GymError(
            ErrorCode.INTERNAL,
            f"the geometric median was not found in max_iterations: {max_iterations} (gradient {size:.2g}, "
            f"tolerance {tolerance:g})",
            "raise max_iterations or tolerance in aggregator_options",
        )

    def _reaches(self, along: Array, square: float) -> Array:
        reaches: Array = np.sqrt((self.squares - 2.0 * along + square).clip(min=0.0) + self.smoothing)
        return reaches

    def _newton(self, point: Array, along: Array, reaches: Array, gradient: Array) -> Array:
        """Approximate ``-hessian^-1 gradient``; the hessian is ``sum_i share_i / reach_i (1 - u_i u_i^T)``."""
        pulls = self.shares / reaches
        total = math.fsum(pulls.tolist())
        step, rest = np.zeros(len(point)), -gradient
        direction, rest_square = rest, dot(rest, symmetric_times(self.gram, rest))
        target = rest_square * min(
            0.01, rest_square
        )  # solve more exactly near the optimum, for quadratic convergence
        for _ in range(min(len(point), 100)):
            image = symmetric_times(self.gram, direction)
            bends = pulls * (dot(point, image) - image) / reaches**2
            curved = total * direction - math.fsum(bends.tolist()) * point + bends
            curvature = dot(image, curved)
            if curvature <= 0.0:
                break
            length = rest_square / curvature
            step = step + length * direction
            rest = rest - length * curved
            before, rest_square = rest_square, dot(rest, symmetric_times(self.gram, rest))
            if rest_square <= target:
                break
            direction = rest + (rest_square / before) * direction
        return step

    def _descends(self, along: Array, reaches: Array, gradient: Array, step: Array) -> bool:
        """Return True if the sum of distances decreases enough; each difference is computed without cancellation."""
        image = symmetric_times(self.gram, step)
        slope = dot(gradient, image)
        change = 2.0 * (dot(step, along) - image) + dot(step, image)
        moved = np.sqrt((reaches**2 + change).clip(min=self.smoothing))
        total = dot(self.shares, change / np.where(moved + reaches > 0.0, moved + reaches, 1.0))
        return slope < 0.0 and total <= 1e-4 * slope


def _medoids(products: Array, shares: Array) -> NDArray[np.intp]:
    """Return the indices of the vectors with the smallest weighted sum of distances, ascending.

    Sums are compared with that of one of them term by term, so that a malicious client's huge distances do not drown
    the others.
    """
    squares = products.diagonal()
    distances = np.sqrt((squares[:, None] + squares - 2.0 * products).clip(min=0.0))
    np.fill_diagonal(distances, 0.0)
    first = int(np.argmin(symmetric_times(distances, shares)))
    both = distances + distances[first]
    more = squares[:, None] - squares[first] - 2.0 * (products - products[first])
    excess = symmetric_times(np.divide(more, both, out=np.zeros_like(both), where=both > 0.0), shares)
    typical = float(np.sort(distances[first])[len(shares) // 2])
    medoids: NDArray[np.intp] = np.nonzero(excess <= excess.min() + 1e-12 * typical)[0]
    return medoids


def _one_of(index: int, count: int) -> Array:
    chosen = np.zeros(count)
    chosen[index] = 1.0
    return chosen
