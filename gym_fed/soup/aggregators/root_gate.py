r"""The mean of the updates with a positive cosine to the root update: robust, with bounded sensitivity.

Every update is judged by the coordinator's own (root) update alone, never by the others::

    c_i = 1 if <g_i, g_0> > 0 else 0             FLTrust's ReLU of the cosine as a gate (Cao et al. 2021, equation 2)
    soup = 1/n sum_i c_i |g_0| / |g_i| g_i       every update at the root update's norm (equation 3)

What one contributor sends changes its own term and nothing else, and no term is longer than the root update. With
differential privacy the clip bounds ``|g_0|`` and so the sensitivity, and the ``gaussian`` mechanism accounts for the
rule as for a mean; the noise falls with ``|g_0|`` (this project; docs/privacy.md has the figures). FLTrust divides by
the sum of the cosines, which is a function of all updates; here the divisor is n. A malicious update that points to the
wrong side counts as zero, and one that hides on the right side counts once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import WeightRule
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
        """f + 1: one honest update."""
        return malicious + 1

    def drops(self, weights: Tensor) -> int | None:
        return 0

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Weight the updates; raises ``UPDATE_REFUSED`` if no update is trusted."""
        trust, factors = trusted(gram, self.name)
        return (trust > 0.0).to(torch.float64) * factors / gram.count
