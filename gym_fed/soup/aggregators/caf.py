"""CAF, the covariance-bound agnostic filter: downweights the updates along the direction of largest variance.

Allouah et al. 2025, "Towards Trustworthy Federated Learning with Untrusted Participants" (arXiv 2505.01874), algorithm
2. With weights c, all 1 at first::

    mean, covariance of the updates under c;  v = its eigenvector of the largest eigenvalue
    tau_i = <v, x_i - mean>^2
    c_i <- c_i (1 - tau_i / tau_max)         while sum_i c_i > n - 2f

The result is the mean whose covariance had the smallest largest eigenvalue. It tolerates f malicious clients out of
n >= 2f + 1: their effect is bounded by the spectral norm of the honest covariance, which need not be known.

The covariance is never formed: with S the square roots of the shares and G the inner products of the centred updates, S
G S has the same largest eigenvalue. ``tau_max`` is taken over updates of positive weight. ByzFL 0.0.11 takes it over
all of them, so one distant update of weight zero stops the filter, and it estimates the direction by a single power
step from a random start. Here the eigenvalue search converges and uses no BLAS or LAPACK, so a replay has the same
bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.gram import Array, GramMatrix, dot, symmetric_times

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 32.0 * float(np.finfo(np.float64).eps)
"""Updates whose squared distance is below this share of their squared norms count as equal."""


class CAFConfig(AggregatorConfig):
    max_stretch: Annotated[float, Field(gt=0)] | None = None
    """Not in the paper: stop once the largest eigenvalue is below this many median squared norms. A single contributor
    with unusual data stretches its own direction by about one and stays in; a coalition of m malicious clients of the
    same norm stretches theirs by m. None: filter to the end."""


class CAF(WeightRule):
    name = "caf"
    robust = True
    Config = CAFConfig
    config: CAFConfig

    def weigh(self, gram: GramMatrix) -> Tensor:
        products, count = gram.products.numpy(), gram.count
        limit = 0.0
        if self.config.max_stretch is not None:
            limit = self.config.max_stretch * float(np.sort(products.diagonal())[(count - 1) // 2])
        return torch.from_numpy(
            filtered(products, np.ones(count), 1 - 2 * self.num_malicious_nodes / count, limit)
        )


def filtered(products: Array, counts: Array, min_share: float, limit: float) -> Array:
    """Run algorithm 2 on inner products.

    Args:
        products: ``[n, n]`` float64.
        counts: ``[n]`` float64 initial weights; not all zero.
        min_share: Filter while the counts sum to more than this share of their initial sum.
        limit: Eigenvalue, in squared norms, at which to stop; 0 for the paper's algorithm.

    Returns:
        ``[n]`` float64 shares that add up to one.
    """
    floor = min_share * math.fsum(counts.tolist())
    best, smallest = counts / math.fsum(counts.tolist()), math.inf
    while True:
        total = math.fsum(counts.tolist())
        shares = counts / total
        largest, projections = _stretch(products, shares)
        if largest * total <= limit:
            return shares
        if largest < smallest:
            best, smallest = shares, largest
        if largest <= 0.0 or total <= floor:
            return best
        if not projections.max() > 0.0:  # too small for float64 to distinguish
            return best
        counts = counts * (1.0 - projections / projections.max())
        if not counts.any():  # all updates of positive weight are stretched equally
            return best


def _stretch(products: Array, shares: Array) -> tuple[float, Array]:
    """Return the largest eigenvalue of the covariance, and the updates' squared projections on its eigenvector.

    Projections are up to a common factor, and 0 for updates of weight zero.
    """
    positive = np.nonzero(shares)[0]
    part, roots = shares[positive], np.sqrt(shares[positive])
    inner = products[np.ix_(positive, positive)]
    along = symmetric_times(inner, part)
    centred = inner - along - along[:, None] + dot(part, along)
    if np.abs(centred).max() <= _ROUNDING * inner.diagonal().max():
        return 0.0, np.zeros(len(shares))
    largest, direction = top_eigenvector(centred * roots * roots[:, None])
    projections = np.zeros(len(shares))
    projections[positive] = symmetric_times(centred, roots * direction) ** 2
    return largest, projections


_TOLERANCE = 1e-9
_MAX_STEPS = 64


def top_eigenvector(matrix: Array) -> tuple[float, Array]:
    """Compute the largest eigenvalue and its eigenvector by Lanczos iteration with full reorthogonalisation.

    See Golub and Van Loan 2013, "Matrix Computations", 10.3.4. Up to n = 64 the result is exact but for rounding.
    Above, it stops at a residual of 1e-9 of the eigenvalue or after 64 steps; if the largest eigenvalues are too close
    to separate, the vector lies in their common eigenspace and is the same in every run.

    Args:
        matrix: ``[n, n]`` float64, positive semi-definite.

    Returns:
        The eigenvalue, and its direction ``[n]`` of length 1.
    """
    count = len(matrix)
    peak = float(np.abs(matrix).max())
    vector: Array = np.random.RandomState(0).random_sample(count) - 0.5  # the same in every version of numpy
    vector = vector / math.sqrt(_dot(vector, vector))
    if peak == 0.0:
        return 0.0, vector
    scaled, most = matrix / peak, min(count, _MAX_STEPS)
    basis = np.empty((most, count))
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        known = len(diagonal) + 1
        basis[known - 1] = vector
        rest: Array = symmetric_times(scaled, vector)
        diagonal.append(_dot(vector, rest))
        for _ in range(2):  # twice, to recover the digits that cancel in the first pass
            overlaps = np.einsum("kn,n->k", basis[:known], rest, optimize=False)
            rest = rest - np.einsum("k,kn->n", overlaps, basis[:known], optimize=False)
        left = math.sqrt(_dot(rest, rest))
        is_last = known == most or left < 1e-14
        if is_last or known % 16 == 0:
            value, parts = _top_of_tridiagonal(diagonal, off_diagonal)
            if is_last or left * abs(parts[-1]) <= _TOLERANCE * value:
                break
        off_diagonal.append(left)
        vector = rest / left
    vector = np.einsum("k,kn->n", np.array(parts), basis[:known], optimize=False)
    return value * peak, vector / math.sqrt(_dot(vector, vector))


def _top_of_tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> tuple[float, list[float]]:
    """Return the largest eigenvalue of a tridiagonal matrix and its unit eigenvector.

    Bisection finds an approximation. Newton steps on the characteristic polynomial then approach from above, where they
    cannot overshoot. Inverse iteration gives the eigenvector, whose Rayleigh quotient is the eigenvalue.
    """
    reach = max(
        abs(m)
        + (abs(off_diagonal[k - 1]) if k else 0.0)
        + (abs(off_diagonal[k]) if k < len(off_diagonal) else 0.0)
        for k, m in enumerate(diagonal)
    )
    low, high = -reach, reach * (1.0 + 1e-14) + 1e-300
    for _ in range(12):
        guess = (low + high) / 2.0
        low, high = (guess, high) if _pivots(diagonal, off_diagonal, guess) is None else (low, guess)
    pivots = _pivots(diagonal, off_diagonal, high)
    assert pivots is not None, "it is Gershgorin's bound, or bisection found it above all eigenvalues"
    for _ in range(100):
        closer = high - 1.0 / _slope(off_diagonal, pivots)
        closer_pivots = _pivots(diagonal, off_diagonal, closer)
        if closer_pivots is None or closer >= high - 1e-15 * reach:
            break
        high, pivots = closer, closer_pivots
    solved = [1.0] * len(diagonal)
    for _ in range(4):
        for k in range(1, len(solved)):
            solved[k] += solved[k - 1] * off_diagonal[k - 1] / pivots[k - 1]
        solved[-1] /= pivots[-1]
        for k in reversed(range(len(solved) - 1)):
            solved[k] = (solved[k] + off_diagonal[k] * solved[k + 1]) / pivots[k]
        size = math.hypot(*solved)
        solved = [part / size for part in solved]
    value = sum(m * part * part for m, part in zip(diagonal, solved, strict=True))
    value += 2.0 * sum(
        b * left * right for b, left, right in zip(off_diagonal, solved[:-1], solved[1:], strict=True)
    )
    return value, solved


def _pivots(diagonal: list[float], off_diagonal: list[float], shift: float) -> list[float] | None:
    """Return the pivots of ``shift - matrix``; None if an eigenvalue is at least ``shift``."""
    pivots: list[float] = []
    for k, m in enumerate(diagonal):
        pivot = shift - m - (off_diagonal[k - 1] ** 2 / pivots[-1] if k else 0.0)
        if pivot <= 0.0:
            return None
        pivots.append(pivot)
    return pivots


def _slope(off_diagonal: list[float], pivots: list[float]) -> float:
    """Return the logarithmic derivative of the characteristic polynomial, which is the product of the pivots."""
    total, change = 0.0, 0.0
    for k, pivot in enumerate(pivots):
        change = 1.0 + (off_diagonal[k - 1] ** 2 * change / pivots[k - 1] ** 2 if k else 0.0)
        total += change / pivot
    return total


def _dot(left: Array, right: Array) -> float:
    return float(np.einsum("i,i->", left, right, optimize=False))
