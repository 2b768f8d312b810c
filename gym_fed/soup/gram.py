"""The Gram matrix of a round's updates, and linear combinations of updates.

Most robust rules use only distances, norms and angles of updates, and return a linear combination of them. Given the
matrix of inner products, such a rule needs no update in memory. The same code works for float deltas, packed sign bits
(whose products are popcounts) and LoRA factors (whose products need no full matrix).

Sums over contributors have the same bits on any number of threads: they do not use BLAS, but add in a fixed order or
round only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_fed.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Needs(IntEnum):
    """The inputs of a rule; a round computes only the inputs that its rules need."""

    NOTHING = 0
    NORMS = 1
    """Only the diagonal of ``products``; other elements may be zero."""
    PRODUCTS = 2
    EVIDENCE = 3
    """All products; if the coordinator has clean rows, also those with its own update, and verdicts on long updates."""
    ROOT = 4
    """All products, including those with the coordinator's own update."""


@dataclass(frozen=True)
class RowEvidence:
    """The evidence of the coordinator's clean rows on the updates of a round.

    Attributes:
        verdicts: For each update, whether its length lowers the loss.
        length: Length of the soup at which the loss is lowest, as a share of its full length.
    """

    verdicts: Sequence[bool]
    length: float = 1.0


@dataclass(frozen=True)
class GramMatrix:
    """Inner products and weights of the n updates of a round.

    Attributes:
        products: ``[n, n]`` float64, inner products of the updates; symmetric, the diagonal holds squared norms.
        weights: ``[n]`` float64, positive; only their ratios matter.
        root: ``[n + 1]`` float64, inner products of the coordinator's own update with each of the n and, last, with
            itself; None if the coordinator has none.
        evidence: Evidence of the coordinator's clean rows on the updates; None without such rows.
    """

    products: Tensor
    weights: Tensor
    root: Tensor | None = None
    evidence: RowEvidence | None = None

    @classmethod
    def of(cls, updates: Tensor, weights: Tensor, root: Tensor | None = None) -> GramMatrix:
        """Compute the matrix of updates ``[n, d]`` in memory, in float64; ``root`` is ``[d]``."""
        rows = updates if root is None else torch.cat([updates, root[None]])
        values = rows.to(torch.float64).numpy()
        products = torch.from_numpy(np.einsum("id,jd->ij", values, values, optimize=False))
        n = len(updates)
        own = None if root is None else torch.cat([products[n, :n], products[n, n:]])
        return cls(products[:n, :n], weights.to(torch.float64), own)

    @property
    def count(self) -> int:
        return len(self.weights)

    def norms(self) -> Tensor:
        """Return the ``[n]`` float64 L2 norms."""
        return self.products.diagonal().clamp_min(0.0).sqrt()

    def squared_distances(self) -> Tensor:
        """Return ``[n, n]`` float64, symmetric, with a diagonal of exact zeros."""
        squares = self.products.diagonal()
        distances = (squares[:, None] + squares[None] - 2.0 * self.products).clamp_min(0.0)
        return distances.fill_diagonal_(0.0)

    def combined(self, combination: CombinationWeights) -> GramMatrix:
        """Return the Gram matrix of the vectors into which ``combination`` combines the updates."""
        matrix = combination.matrix
        products = _combined(matrix, _combined(matrix, self.products).T.contiguous())
        root = None
        if self.root is not None:
            root = torch.cat([_combined(matrix, self.root[:-1, None])[:, 0], self.root[-1:]])
        return GramMatrix((products + products.T) / 2, combination.weights, root, self.evidence)


@dataclass(frozen=True)
class CombinationWeights:
    """Weights that combine n updates linearly into m vectors.

    Attributes:
        matrix: ``[m, n]`` float64; vector k is ``sum_i matrix[k, i] * update_i``.
        weights: ``[m]`` float64 weights of the m vectors, positive.
    """

    matrix: Tensor
    weights: Tensor

    @classmethod
    def identity(cls, weights: Tensor) -> CombinationWeights:
        """Return the identity, which keeps each update."""
        return cls(torch.eye(len(weights), dtype=torch.float64), weights)

    @classmethod
    def scaled(cls, factors: Tensor, weights: Tensor) -> CombinationWeights:
        """Scale each update by its own factor, ``[n]`` float64."""
        return cls(torch.diag(factors.to(torch.float64)), weights)

    @classmethod
    def single(cls, coefficients: Tensor) -> CombinationWeights:
        """Combine all updates into one vector with ``[n]`` float64 coefficients."""
        return cls(coefficients.to(torch.float64)[None], torch.ones(1, dtype=torch.float64))

    def applied(self, updates: Tensor) -> Tensor:
        """Combine updates: ``[n, d]`` floats to ``[m, d]`` float64, added in the order of contributors."""
        total = torch.zeros(len(self.matrix), updates.shape[1], dtype=torch.float64)
        for coefficients, update in zip(self.matrix.T, updates, strict=True):
            if bool(coefficients.any()):
                total += torch.outer(coefficients, update.to(torch.float64))
        return total

    def after(self, earlier: CombinationWeights) -> CombinationWeights:
        """Compose with an ``earlier`` combination; the result applies to the original updates."""
        return CombinationWeights(_combined(self.matrix, earlier.matrix), self.weights)


def _combined(left: Tensor, right: Tensor) -> Tensor:
    """Compute ``left @ right`` without BLAS, whose last bits depend on the number of threads."""
    if left.shape[0] == left.shape[1] and torch.equal(left, torch.diag(left.diagonal())):
        return (
            left.diagonal()[:, None] * right
        )  # the same bits as the general case, but fast for a thousand scaled updates
    return torch.from_numpy(np.einsum("ij,jk->ik", left.numpy(), right.numpy(), optimize=False))


Array: TypeAlias = NDArray[Any]
"""float64"""


def symmetric_times(matrix: Array, vector: Array) -> Array:
    """Compute ``matrix @ vector`` for a symmetric ``[n, n]`` float64, in a fixed order."""
    product: Array = np.einsum("ij,j->i", matrix, vector, optimize=False)
    return product


def dot(left: Array, right: Array) -> float:
    """Compute an inner product whose sum is rounded once."""
    return math.fsum((left * right).tolist())
