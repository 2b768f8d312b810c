"""FLTrust: weight updates by their cosine to the coordinator's own (root) update.

Cao et al. 2021, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", algorithm 2. The weight of an
update is its cosine to the root update, or zero if that is negative. Each is scaled to the root update's norm. The rule
tolerates any number of malicious clients below n if the root update, trained on the coordinator's clean data, is
correct: the result is never longer than the root update.

If no update has a positive cosine, the paper divides by zero. Here the round is refused: a soup of zeros would look
like progress. A zero update has no direction and gets weight zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.aggregator import WeightRule
from gym_fed.soup.gram import GramMatrix, Needs

if TYPE_CHECKING:
    from torch import Tensor


class FLTrust(WeightRule):
    name = "fltrust"
    robust = True
    needs = Needs.ROOT

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """Return f + 1, so that one update is honest."""
        return malicious + 1

    def weigh(self, gram: GramMatrix) -> Tensor:
        """Weight the updates; raises ``UPDATE_REFUSED`` if no update is trusted."""
        trust, factors = trusted(gram, self.name)
        return trust / math.fsum(trust.tolist()) * factors


def trusted(gram: GramMatrix, rule: str) -> tuple[Tensor, Tensor]:
    """Compute trust scores (equation 2), and factors that scale updates to the root update's norm (equation 3).

    Args:
        gram: The Gram matrix of a round with a root update.
        rule: Name of the rule for error messages.

    Returns:
        Trust scores and factors, each ``[n]`` float64.

    Raises:
        GymError: ``UPDATE_REFUSED`` if no update is trusted.
    """
    assert gram.root is not None, "the round provides a root update to rules that need one"
    root_norm = math.sqrt(max(0.0, float(gram.root[-1])))
    norms = gram.norms()
    if root_norm == 0.0:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"the root update of aggregator {rule!r} is zero and has no direction",
            "train the root update on more of the coordinator's data",
        )
    lengths = torch.where(norms > 0.0, norms, 1.0)
    trust = (gram.root[:-1] / lengths / root_norm).clamp_min(0.0) * (norms > 0.0)
    if math.fsum(trust.tolist()) == 0.0:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"no update of {gram.count} has a positive cosine to the root update of aggregator {rule!r}",
            "check the coordinator's data, whose update disagrees with all others",
        )
    return trust, root_norm / lengths
