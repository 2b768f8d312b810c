"""The package's aggregation rules as defences, and a fast prediction of their soup for attackers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from _digits import Losses
from torch import Tensor

from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.aggregators.byzantine_evidence import LENGTHS, MAX_LENGTH, ByzantineEvidence
from gym_fed.soup.aggregators.byzantine_robust import MAX_STRETCH, ByzantineRobust
from gym_fed.soup.aggregators.caf import CAF
from gym_fed.soup.aggregators.fltrust import trusted
from gym_fed.soup.aggregators.fltrust_caf import FLTrustCAF
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs, RowEvidence
from gym_fed.soup.pipeline import Pipeline

DEFAULT = ByzantineEvidence.name
ROOT_ALONE = "root alone"
"""A baseline without contributors, whose soup is the coordinator's own update."""
BUDGET_ONLY = f"{DEFAULT} without rows"
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
    "byzantine_robust",
    "fltrust",
    "fltrust_caf",
    DEFAULT,
    BUDGET_ONLY,
    ROOT_ALONE,
)


class Defence:
    """Pre-aggregators and an aggregator of the registry, such as ``norm_cap+nnm+trimmed_mean``."""

    def __init__(self, rule: str, malicious: int) -> None:
        *before, last = rule.removesuffix(" without rows").split("+")
        self.rule = rule
        self.pipeline: Pipeline | None = None
        if rule != ROOT_ALONE:
            # The mean tolerates no malicious clients and refuses any number above 0.
            declared = 0 if last == "mean" else malicious
            self.pipeline = Pipeline.of(
                SoupRecipe(aggregator=last, pre_aggregators=before, num_malicious_nodes=declared)
            )
        self.max_length = MAX_LENGTH if last == ByzantineEvidence.name else 1.0
        """Maximum length of an update in the soup, as a multiple of the median norm."""

    def merge(
        self, updates: Tensor, root: Tensor, losses: Losses | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the ``[d]`` soup of ``[n, d]`` updates, and ``[n]`` coefficients if the rule weights whole updates."""
        if self.pipeline is None:
            return root, torch.zeros(len(updates))
        try:
            plan = self.pipeline.plan(self._judged(self._gram_matrix(updates, root, losses), updates, losses))
        except GymError as error:
            if error.code is not ErrorCode.UPDATE_REFUSED:
                raise
            return torch.zeros_like(root), torch.zeros(len(updates))
        rows = plan.matrix.float() @ updates
        soup = self.pipeline.aggregator.combine(rows, plan.weights)
        return soup, plan.matrix[0] if len(plan.matrix) == 1 else None

    def expected(self, updates: Tensor, root: Tensor, losses: Losses | None = None) -> Tensor:
        """Return the ``[d]`` soup as computed by an attacker, which is faster and equal up to rounding."""
        last = None if self.pipeline is None else self.pipeline.aggregator
        if self.pipeline is None or not isinstance(
            last, CAF | ByzantineRobust | FLTrustCAF | ByzantineEvidence
        ):
            return self.merge(updates, root, losses)[0]
        gram = self._gram_matrix(updates, root, losses)
        if isinstance(last, ByzantineRobust):
            return _FastRobust(last.config).weigh(gram).float() @ updates
        if isinstance(last, ByzantineEvidence):
            fast = _FastEvidence(last.config)
            try:
                return fast.weigh(self._judged(gram, updates, losses, fast)).float() @ updates
            except GymError:
                return torch.zeros_like(root)
        total = CombinationWeights.identity(gram.weights)
        steps = [step.mix for step in self.pipeline.pre_aggregators]
        counts, norm, stretch = torch.ones(len(updates), dtype=torch.float64), None, MAX_STRETCH
        if isinstance(last, FLTrustCAF):
            try:
                trust, factors = trusted(gram, last.name)
            except GymError:
                return torch.zeros_like(root)
            counts, norm = (trust > 0.0).double(), float(root @ root)
            steps.append(lambda gram: CombinationWeights.scaled(factors, gram.weights))
        else:
            stretch = last.config.max_stretch or 0.0
        for mix in steps:
            combination = mix(gram)
            total, gram = combination.after(total), gram.combined(combination)
        shares = caf_shares(
            gram.products.numpy(), counts.numpy(), last.num_malicious_nodes, stretch, squared_norm=norm
        )
        return (torch.from_numpy(shares) @ total.matrix).float() @ updates

    def _judged(
        self, gram: GramMatrix, updates: Tensor, losses: Losses | None, rule: Aggregator | None = None
    ) -> GramMatrix:
        """Add the length evidence, for rules that need it."""
        assert self.pipeline is not None
        last = rule or self.pipeline.aggregator
        if not isinstance(last, ByzantineEvidence) or losses is None or self.rule == BUDGET_ONLY:
            return gram
        base, claimed = last.claims(gram)
        long = claimed.nonzero()[:, 0]
        soup = base.float() @ updates
        further = claimed[long, None].float() * updates[long]
        found = losses(soup + torch.cat([torch.zeros_like(soup)[None], further]))
        verdicts = torch.zeros(len(updates), dtype=torch.bool)
        verdicts[long] = found[1:] < found[0]
        together = (claimed[verdicts, None].float() * updates[verdicts]).sum(0)
        if verdicts.sum() > 1 and not losses((soup + together)[None])[0] < found[0]:
            verdicts[:] = False
        if verdicts.any():
            soup = soup + together
        lengths = losses(torch.tensor(LENGTHS)[:, None] * soup).nan_to_num(nan=math.inf)
        return replace(gram, evidence=RowEvidence(verdicts.tolist(), LENGTHS[int(lengths.argmin())]))

    def _gram_matrix(self, updates: Tensor, root: Tensor, losses: Losses | None) -> GramMatrix:
        assert self.pipeline is not None
        products = (updates @ updates.T).double()
        own = None
        has_rows = losses is not None and self.rule != BUDGET_ONLY
        if self.pipeline.needs is Needs.ROOT or (self.pipeline.needs is Needs.EVIDENCE and has_rows):
            own = torch.cat([updates @ root, (root @ root)[None]]).double()
        return GramMatrix(products, torch.ones(len(updates), dtype=torch.float64), own)


class _FastRobust(ByzantineRobust):
    """A faster ``byzantine_robust``, for attackers."""

    def weigh(self, gram: GramMatrix) -> Tensor:
        scaled = self._scale.mix(gram)
        products = gram.combined(scaled).products.numpy()
        counts: np.ndarray = np.ones(gram.count)
        shares = caf_shares(products, counts, self.num_malicious_nodes, MAX_STRETCH)
        return torch.from_numpy(shares) @ scaled.matrix


class _FastEvidence(ByzantineEvidence):
    """A faster ``byzantine_evidence``, for attackers."""

    def _shares(self, products: np.ndarray, counts: np.ndarray, squared_norm: float) -> np.ndarray:
        return caf_shares(products, counts, self.num_malicious_nodes, MAX_STRETCH, squared_norm)


def caf_shares(
    products: np.ndarray,
    counts: np.ndarray,
    malicious: int,
    max_stretch: float,
    squared_norm: float | None = None,
) -> np.ndarray:
    """Return the weights of ``caf`` from LAPACK's eigenvectors instead of the package's reproducible search."""
    count = len(products)
    if squared_norm is None:
        squared_norm = float(np.sort(products.diagonal())[(count - 1) // 2])
    limit, floor = max_stretch * squared_norm, float(counts.sum()) * (1 - 2 * malicious / count)
    best: np.ndarray = counts / counts.sum()
    smallest = math.inf
    while True:
        shares: np.ndarray = counts / counts.sum()
        along = products @ shares
        centred = products - along - along[:, None] + shares @ along
        roots = np.sqrt(shares)
        values, vectors = np.linalg.eigh(roots[:, None] * centred * roots)
        if values[-1] * counts.sum() <= limit:
            return shares
        if values[-1] < smallest:
            smallest, best = values[-1], shares
        stretch = np.where(shares > 0.0, (centred @ (roots * vectors[:, -1])) ** 2, 0.0)
        if counts.sum() <= floor or stretch.max() <= 1e-12 * products.diagonal().max() ** 2:
            return best
        counts = counts * (1.0 - stretch / stretch.max())
