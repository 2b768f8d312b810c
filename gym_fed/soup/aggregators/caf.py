"""CAF, the covariance-bound agnostic filter: what stretches the updates most in one direction is weighed down.

Allouah et al. 2025, "Towards Trustworthy Federated Learning with Untrusted Participants" (arXiv 2505.01874), algorithm
2. With weights c, all 1 at first::

    mean, covariance of the updates under c;  v = its eigenvector of the largest eigenvalue
    tau_i = <v, x_i - mean>^2
    c_i <- c_i (1 - tau_i / tau_max)         while sum_i c_i > n - 2f

The result is the mean whose covariance had the smallest largest eigenvalue. It withstands f malicious clients of
n >= 2f + 1: their harm is bounded by the spectral norm of the honest covariance, with no need to know it.

The covariance is never formed: with S the roots of the shares and G the inner products of the centred updates, S G S
has the same largest eigenvalue. ``tau_max`` is taken over updates that still count. ByzFL 0.0.11 takes it over all, so
that one far update that counts for nothing any more stops the filter, and finds the direction by a single power step
from a random start; here the search converges, and a replay finds the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.lazy_torch import torch
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.linalg.gram import GramMatrix
from gym_fed.soup.linalg.ordered import Array, dot, symmetric_times
from gym_fed.soup.linalg.spectrum import top_eigenvector

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 32.0 * float(np.finfo(np.float64).eps)
"""Updates that differ by less, against their squared norms, are equal."""


class CAFConfig(AggregatorConfig):
    max_stretch: Annotated[float, Field(gt=0)] | None = None
    """Not in the paper: end as soon as the updates that count stretch no direction by more than so many median squared
    norms, all together. A lone contributor with unlike data stretches its own direction by about one, and stays in; a
    coalition of malicious clients of its size by as many as they are. Absent: filter to the end."""


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


def filtered(products: Array, counts: Array, kept: float, limit: float) -> Array:
    """Algorithm 2 on inner products.

    Args:
        products: ``[n, n]`` float64.
        counts: ``[n]`` float64, what each counts at first; not all zero.
        kept: Filter while the counts add up to more than this part of what they added up to at first.
        limit: End as soon as no direction is stretched by more, in squared norms; 0 for the paper's algorithm.

    Returns:
        ``[n]`` float64 shares that add up to one.
    """
    floor = kept * math.fsum(counts.tolist())
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
        if not counts.any():  # all that still counted were stretched alike
            return best


def _stretch(products: Array, shares: Array) -> tuple[float, Array]:
    """The largest eigenvalue of the covariance, and each update's squared projection on its direction, up to a factor;
    0 for updates of no share."""
    kept = np.nonzero(shares)[0]
    part, roots = shares[kept], np.sqrt(shares[kept])
    inner = products[np.ix_(kept, kept)]
    along = symmetric_times(inner, part)
    centred = inner - along - along[:, None] + dot(part, along)
    if np.abs(centred).max() <= _ROUNDING * inner.diagonal().max():
        return 0.0, np.zeros(len(shares))
    largest, direction = top_eigenvector(centred * roots * roots[:, None])
    projections = np.zeros(len(shares))
    projections[kept] = symmetric_times(centred, roots * direction) ** 2
    return largest, projections
