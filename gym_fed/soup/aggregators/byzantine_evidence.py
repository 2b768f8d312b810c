r"""Filter directions, and let clean rows decide the lengths of long updates and of the soup.

``byzantine_robust`` scales every update to the median norm. Contributors with data that no one else has send long
updates and lose most of their length, also with ``fltrust_caf``. Here directions are filtered as in ``fltrust_caf``,
and lengths are treated separately (this project; docs/robustness.md has the figures). With g_0 the coordinator's own
update, m the median norm and l_i = min(|g_i| / m, 4)::

    s_i = m / |g_i| g_i                                  every update at the median norm
    c_i = 1 if <g_i, g_0> > 0 else 0                     FLTrust's ReLU as a gate (Cao et al. 2021, equation 2)
    soup_0 = CAF of the s_i with counts c_i              (Allouah et al. 2025, algorithm 2) = sum_i a_i g_i
    v_i = 1 if loss(soup_0 + (l_i - 1) a_i g_i) < loss(soup_0)         for l_i > 1.2, on the clean rows
    v   = 0 if loss(soup_0 + sum_i v_i (l_i - 1) a_i g_i) >= loss(soup_0)
    soup = t sum_i a_i (l_i if v_i else 1) g_i           with the t in ``LENGTHS`` of the lowest loss on the clean rows

The sum of updates from different data overshoots, and a shorter soup contains less of an attack. The rule itself sees
only inner products, v_i and t, so a replay needs the records but no model. Without clean rows all c_i and t are 1, and
all excess lengths together are scaled down to a budget of two medians. A cap without evidence or budget is not
safe: on digits, attackers who exploited it reduced the accuracy from 97% to 64%.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.aggregators.byzantine_robust import MAX_STRETCH, ByzantineRobust
from gym_fed.soup.aggregators.caf import filtered
from gym_fed.soup.aggregators.fltrust import trusted
from gym_fed.soup.gram import Array, GramMatrix, Needs
from gym_fed.soup.pre_aggregators.equal_norm import EqualNorm

if TYPE_CHECKING:
    from torch import Tensor

MAX_LENGTH = 4.0
"""Maximum length of an update in the soup, in median norms."""

LONG = 1.2
"""Length above which an update needs a verdict, in median norms; shorter ones are scaled to the median."""

LENGTHS = (1.0, 0.7, 0.5, 0.35, 0.25)
"""Lengths of the soup that are tried on the clean rows, as shares of its full length."""

BUDGET = 2.0
"""Maximum sum of all excess lengths without clean rows, in median norms."""


class ByzantineEvidence(WeightRule):
    name = "byzantine_evidence"
    robust = True
    needs = Needs.EVIDENCE

    def __init__(self, config: AggregatorConfig) -> None:
        super().__init__(config)
        self._scale = EqualNorm(config)

    @classmethod
    def default_malicious(cls, contributors: int) -> int:
        return ByzantineRobust.default_malicious(contributors)

    def claims(self, gram: GramMatrix) -> tuple[Tensor, Tensor]:
        """Claim the excess of every long update over the median norm; see ``Aggregator.claims``."""
        base, excess = self._split(gram)
        return base, base * torch.where(excess > LONG - 1.0, excess, 0.0)

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Weight the updates; raises ``UPDATE_REFUSED`` if there is a root update and it trusts none."""
        if gram.evidence is not None:
            base, claimed = self.claims(gram)
            verdicts = torch.tensor(list(gram.evidence.verdicts), dtype=torch.bool)
            return gram.evidence.length * (base + torch.where(verdicts, claimed, 0.0))
        base, excess = self._split(gram)
        total = math.fsum(excess[base > 0.0].tolist())
        return base * (1.0 + excess * min(1.0, BUDGET / total)) if total > 0.0 else base

    def _split(self, gram: GramMatrix) -> tuple[Tensor, Tensor]:
        """Return the coefficients at the median norm, and each excess length in median norms, at most 3."""
        norms = gram.norms()
        median = norms.sort().values[(gram.count - 1) // 2]
        lengths = norms / median if median > 0.0 else torch.zeros_like(norms)
        counts = torch.ones_like(norms)
        if gram.root is not None:
            trust, _ = trusted(gram, self.name)
            counts = (trust > 0.0).to(torch.float64)
        scaled = self._scale.mix(gram)
        shares = self._shares(gram.combined(scaled).products.numpy(), counts.numpy(), float(median) ** 2)
        return torch.from_numpy(shares) @ scaled.matrix, lengths.clamp(1.0, MAX_LENGTH) - 1.0

    def _shares(self, products: Array, counts: Array, squared_norm: float) -> Array:
        """Return CAF's shares for updates of equal norm, ``[n]``."""
        honest_share = 1.0 - 2.0 * self.num_malicious_nodes / len(counts)
        return filtered(products, counts, honest_share, MAX_STRETCH * squared_norm)
