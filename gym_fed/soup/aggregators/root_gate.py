r"""The mean of the updates with a positive cosine to the root update: robust, with bounded sensitivity.

Every update is compared only with the coordinator's own (root) update, never with the others::

    c_i = 1 if <g_i, g_0> > 0 else 0             FLTrust's ReLU of the cosine as a gate (Cao et al. 2021, equation 2)
    soup = 1/n sum_i c_i |g_0| / |g_i| g_i       every update at the root update's norm (equation 3)

An update changes its own term only, and no term is longer than the root update. With differential privacy the clip
bounds ``|g_0|`` and therefore the sensitivity, and the ``gaussian`` mechanism accounts for the rule as for a mean; the
noise decreases with ``|g_0|`` (this project; figures in docs/privacy.md). FLTrust divides by the sum of the cosines,
which depends on all updates; here the divisor is n. A malicious update with a negative cosine counts as zero, and one
with a positive cosine counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.aggregators.byzantine_robust import ByzantineRobust
from gym_fed.soup.aggregators.fltrust import trusted
from gym_fed.soup.gram import GramMatrix, Needs

if TYPE_CHECKING:
    from torch import Tensor


class RootGate(WeightRule):
    name = "root_gate"
    robust = True
    needs = Needs.ROOT
    bounds_one = True

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """Return f + 1, so that one update is honest."""
        return malicious + 1

    @classmethod
    def default_malicious(cls, contributors: int) -> int:
        """Return a fifth of the contributors, chosen by measurement; 1 for three or four of them."""
        return ByzantineRobust.default_malicious(contributors)

    def drops(self, weights: Tensor) -> int | None:
        return 0

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Weight the updates; raises ``UPDATE_REFUSED`` if no update is trusted."""
        trust, factors = trusted(gram, self.name)
        return (trust > 0.0).to(torch.float64) * factors / gram.count
