"""Karcher mean of directions on the sphere, scaled by the mean norm.

Karcher 1977, "Riemannian center of mass and mollifier smoothing". mergekit's ``karcher``, iterated to convergence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import combination, inner_products

if TYPE_CHECKING:
    from torch import Tensor

_NOWHERE = 1e-9
"""Length of the mean of unit vectors below which they have no common direction."""


class KarcherConfig(MethodConfig):
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-10
    """Gradient of the mean squared angle, in radians, at which the iteration stops."""

    max_iterations: Annotated[int, Field(ge=1)] = 1000
    """Maximum number of gradient descent steps before the method fails with an error."""


class Karcher(MergeMethod):
    """Average directions along the sphere, so that nearly orthogonal deltas do not shrink each other.

    The mean ``m`` minimises ``sum_i w_i angle(m, u_i)**2`` over unit vectors, by steps of ``sum_i w_i log_m(u_i)``
    starting at their normalised arithmetic mean. It is always a linear combination of the ``u_i``, so their inner
    products are enough and the tensors are read only twice. It is multiplied by ``sum_i w_i |delta_i|`` as in mergekit,
    zeros included; a zero delta has no direction. Opposite directions of equal weight have no mean: the result is zero.
    A direction exactly opposite to ``m`` has no effect (mergekit divides by zero there).
    """

    name = "karcher"
    Config = KarcherConfig
    config: KarcherConfig

    def _merge(self, task: TensorTask) -> Tensor:
        products = inner_products(task.deltas).numpy()
        norms, shares = np.sqrt(products.diagonal()), task.shares.numpy()
        moved = norms > 0
        coefficients = np.zeros(len(norms))
        if moved.any():
            cosines = products[np.ix_(moved, moved)] / np.outer(norms[moved], norms[moved])
            mean = self._mean_direction(task.name, _coordinates(cosines), shares[moved] / shares[moved].sum())
            coefficients[moved] = mean / norms[moved] * float((shares * norms).sum())
        return combination(task.deltas, torch.from_numpy(coefficients))

    def _mean_direction(self, name: str, units: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the coefficients ``[k]`` of the mean of unit vectors ``[k, k]``; zeros if they have no mean."""
        length = _norm(_combined(weights, units))
        if length < _NOWHERE:
            return np.zeros_like(weights)
        direction = weights / length
        for _ in range(self.config.max_iterations):
            mean = _combined(direction, units)
            cosines = np.clip((units * mean).sum(axis=1), -1.0, 1.0)
            sines = np.sqrt((1.0 - cosines) * (1.0 + cosines))
            # log_mean(u) = angle / sine * (u - cosine * mean), which tends to u - mean as the two approach.
            stretch = np.where(cosines > 0, 1.0, 0.0)
            np.divide(np.arccos(cosines), sines, out=stretch, where=sines > 1e-12)
            step = weights * stretch - float((weights * stretch * cosines).sum()) * direction
            length = _norm(_combined(step, units))
            if length < self.config.tolerance:
                return direction
            direction = np.cos(length) * direction + np.sin(length) / length * step
            direction = direction / _norm(_combined(direction, units))
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"tensor {name!r}: the Karcher mean did not converge to {self.config.tolerance} in "
            f"{self.config.max_iterations} iterations",
            "raise max_iterations or tolerance",
        )


def _coordinates(cosines: np.ndarray) -> np.ndarray:
    """Return unit vectors ``[k, k]``, one per row, with these inner products: a Cholesky factor, zero if dependent.

    In coordinates, the length of a sum that cancels is accurate; from inner products its error would be 1e-8.
    """
    units = np.zeros_like(cosines)
    for j in range(len(cosines)):
        rest = cosines[j:, j] - (units[j:, :j] * units[j, :j]).sum(axis=1)
        if rest[0] > 1e-14:
            units[j:, j] = rest / np.sqrt(rest[0])
    return units


def _combined(coefficients: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.asarray((coefficients[:, None] * units).sum(axis=0))


def _norm(vector: np.ndarray) -> float:
    return float(np.sqrt(np.square(vector).sum()))
