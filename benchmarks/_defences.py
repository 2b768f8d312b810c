"""The package's aggregation rules as the attacks' opponents, and what an attacker who knows the rule expects of it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gym_fed.config.soup import SoupRecipe
from gym_fed.soup.aggregators.byzantine_robust import ByzantineRobust
from gym_fed.soup.aggregators.caf import CAF
from gym_fed.soup.geometry import Geometry, Mixture
from gym_fed.soup.pipeline import Pipeline

DEFAULT = "byzantine_robust"
RULES = (
    "mean",
    "norm_cap+mean",
    "norm_cap+nnm+trimmed_mean",
    "arc+nnm+trimmed_mean",
    "nnm+trimmed_mean",
    "trimmed_mean",
    "norm_cap+median",
    "norm_cap+geometric_median",
    "norm_cap+nnm+geometric_median",
    "norm_cap+nnm+centred_clipping",
    "krum",
    "norm_cap+multi_krum",
    "norm_cap+nnm+minimum_diameter",
    "norm_cap+mean_around_median",
    "majority_vote",
    "caf",
    "norm_cap+caf",
    "norm_cap+nnm+caf",
    DEFAULT,
)


class Defence:
    """Pre-aggregators and an aggregator of the registry, ``norm_cap+nnm+trimmed_mean`` for one.

    Args:
        rule: Their names.
        liars: What the coordinator declares, f.
    """

    def __init__(self, rule: str, liars: int) -> None:
        *before, last = rule.split("+")
        self.rule = rule
        self.pipeline = Pipeline.of(
            SoupRecipe(
                aggregator=last,
                pre_aggregators=before,
                # The mean withstands nobody, and says so by refusing any number of liars.
                num_malicious_nodes=0 if last == "mean" else liars,
            )
        )

    def merge(self, updates: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[n, d]`` float32 updates to the ``[d]`` soup, and each one's ``[n]`` coefficient where it has one."""
        return self._merge(updates, self.pipeline.plan(self._geometry(updates)))

    def expected(self, updates: Tensor) -> Tensor:
        """``[d]``: the soup as an attacker works it out, the same but for rounding, but sooner."""
        geometry = self._geometry(updates)
        last = self.pipeline.aggregator
        if not isinstance(last, CAF | ByzantineRobust):
            return self._merge(updates, self.pipeline.plan(geometry))[0]
        total = Mixture.identity(geometry.weights)
        steps = [step.mix for step in self.pipeline.pre_aggregators]
        for mix in [*steps, last._scale.mix] if isinstance(last, ByzantineRobust) else steps:
            mixture = mix(geometry)
            total, geometry = mixture.after(total), geometry.mixed(mixture)
        filtering = last._filter.config if isinstance(last, ByzantineRobust) else last.config
        products = geometry.products.numpy()
        shares = torch.from_numpy(
            caf_shares(products, filtering.num_malicious_nodes, filtering.max_stretch or 0.0)
        )
        return (shares @ total.matrix).float() @ updates

    def _merge(self, updates: Tensor, plan: Mixture) -> tuple[Tensor, Tensor | None]:
        rows = plan.matrix.float() @ updates
        soup = self.pipeline.aggregator.combine(rows, plan.weights)
        return soup, plan.matrix[0] if len(plan.matrix) == 1 else None

    @staticmethod
    def _geometry(updates: Tensor) -> Geometry:
        return Geometry((updates @ updates.T).double(), torch.ones(len(updates), dtype=torch.float64))


def caf_shares(products: np.ndarray, liars: int, max_stretch: float) -> np.ndarray:
    """What ``caf`` weighs updates by, from a LAPACK eigenvector and not the package's repeatable search for it."""
    count = len(products)
    limit = max_stretch * float(np.sort(products.diagonal())[(count - 1) // 2])
    counts, best, smallest = np.ones(count), np.ones(count) / count, math.inf
    while True:
        shares = counts / counts.sum()
        along = products @ shares
        centred = products - along - along[:, None] + shares @ along
        roots = np.sqrt(shares)
        values, vectors = np.linalg.eigh(roots[:, None] * centred * roots)
        if values[-1] * counts.sum() <= limit:
            return shares
        if values[-1] < smallest:
            smallest, best = values[-1], shares
        stretch = np.where(shares > 0.0, (centred @ (roots * vectors[:, -1])) ** 2, 0.0)
        if counts.sum() <= count - 2 * liars or stretch.max() <= 1e-12 * products.diagonal().max() ** 2:
            return best
        counts = counts * (1.0 - stretch / stretch.max())
