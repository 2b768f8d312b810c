r"""FLTrust with CAF: select updates by FLTrust and weight them by CAF; needs clean data of the coordinator.

``byzantine_robust`` has no trusted direction, so small changes in one direction pass its filter. FLTrust weights by the
cosine to the root update, so a client that knows that update gets the largest weight. Each rule closes the other's gap
(this project; docs/robustness.md has the figures)::

    s_i = |g_0| / |g_i| g_i                      every update at the root update's norm (Cao et al. 2021, equation 3)
    c_i = 1 if <g_i, g_0> > 0 else 0             the sign of FLTrust's ReLU of the cosine (equation 2)
    soup = CAF of the s_i with counts c_i        (Allouah et al. 2025, algorithm 2)

CAF stops as in ``byzantine_robust``: as soon as no direction is stretched by more than the limit for a single
contributor. The soup is a mean of vectors of the root update's norm, so it is never longer. If no update has a positive
cosine, the round is refused, as by ``fltrust``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.aggregators.byzantine_robust import MAX_STRETCH
from gym_fed.soup.aggregators.caf import filtered
from gym_fed.soup.aggregators.fltrust import trusted
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs

if TYPE_CHECKING:
    from torch import Tensor


class FLTrustCAF(WeightRule):
    name = "fltrust_caf"
    robust = True
    needs = Needs.ROOT

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Weight the updates; raises ``UPDATE_REFUSED`` if no update is trusted."""
        assert gram.root is not None, "the round provides a root update to rules that need one"
        trust, factors = trusted(gram, self.name)
        scaled = gram.combined(CombinationWeights.scaled(factors, gram.weights))
        counts = (trust > 0.0).to(torch.float64)
        limit = MAX_STRETCH * float(gram.root[-1])
        honest_share = 1.0 - 2.0 * self.num_malicious_nodes / gram.count
        return (
            torch.from_numpy(filtered(scaled.products.numpy(), counts.numpy(), honest_share, limit)) * factors
        )
