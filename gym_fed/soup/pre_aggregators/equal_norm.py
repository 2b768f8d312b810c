"""Equal norms: scale every update to the round's median norm.

A cap stops malicious clients that send large updates, but not those that send small ones. Updates below the cap stretch
the round's covariance less, so a filter by spread (``caf``) overlooks them while their common direction adds up. With
equal norms only directions differ. Cutkosky & Mehta 2020, "Momentum Improves Normalized SGD", normalise the step for a
similar reason; the combination is this project's. The median is always one of the norms, the lower of the middle two
for an even number: with f malicious clients out of n >= 2f + 1, it never exceeds an honest norm. For a sign delta only
the scale changes, exactly and at no cost.
"""

from __future__ import annotations

from gym_fed.core.lazy import torch
from gym_fed.soup.gram import CombinationWeights, GramMatrix, Needs
from gym_fed.soup.pre_aggregator import PreAggregator


class EqualNorm(PreAggregator):
    name = "equal_norm"
    needs = Needs.NORMS

    def mix(self, gram: GramMatrix) -> CombinationWeights:
        """Scale the updates; an update of zeros stays zero."""
        norms = gram.norms()
        median = norms.sort().values[(gram.count - 1) // 2]
        tiny = torch.finfo(torch.float64).tiny
        return CombinationWeights.scaled(
            torch.where(norms > 0.0, median / norms.clamp_min(tiny), 1.0), gram.weights
        )
