"""The window of a continuous round: the rules weigh everybody's latest update, and only the new ones are added.

A continuous round is merged as soon as a few updates have arrived, and malicious clients can be the fastest. A rule
that sees only those few has no honest majority. Therefore it weighs the latest update of every contributor, but only
the new updates are added, with their coefficients. This needs only inner products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_fed.core.lazy import torch
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.gram import CombinationWeights

if TYPE_CHECKING:
    from torch import Tensor

MOST_SHARES = 2.0
"""Maximum number of equal shares that one update counts as. A rule that also drops honest updates gives the others more
than one share; the bound keeps a few updates from making up a whole round."""


def staleness_weight(staleness: int) -> float:
    """Return ``1 / sqrt(1 + staleness)``, the weight of an update that is N versions old.

    Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation" (arXiv 2106.06639), section 5.
    """
    return float((1 + staleness) ** -0.5)


@dataclass(frozen=True)
class RoundWindow:
    """The part of a continuous round that a synchronous one lacks.

    Attributes:
        merge_every: Admitted weight at which a round is merged, K.
        staleness: Age of each new update, in versions.
        others: Latest updates of the contributors without a new one; weighed, but not added.
        other_weights: Positive weight of each of ``others``.
    """

    merge_every: int
    staleness: Sequence[int]
    others: Sequence[DeltaFile] = ()
    other_weights: Sequence[float] = ()

    def added(
        self, plan: CombinationWeights, lengths: Tensor
    ) -> tuple[CombinationWeights, tuple[float, ...]]:
        """Return the combination of only the new updates, and the admitted weight of each.

        With ``r`` the coefficient of an update times the window's size n, and ``w`` its staleness weight, its admitted
        weight is ``w * share`` (``_shares``), and its coefficient ``w * r / d``. ``d`` is the sum of the admitted
        weights, and at least ``min(merge_every, n)``: a round that is merged early makes a smaller step, and one with a
        rejected majority cannot amplify the others.

        Args:
            plan: ``[1, n]`` coefficients of the new updates followed by ``others``.
            lengths: ``[n]`` float64 norms of the vectors that the plan combines.
        """
        count, size = len(self.staleness), plan.matrix.shape[1]
        stale = torch.tensor([staleness_weight(age) for age in self.staleness], dtype=torch.float64)
        relative = plan.matrix[0] * size
        admitted = tuple((stale * _shares(relative, lengths)[:count]).tolist())
        step = max(sum(admitted), float(min(self.merge_every, size)))
        return CombinationWeights.single(stale * relative[:count] / step), admitted


def _shares(relative: Tensor, lengths: Tensor) -> Tensor:
    """Return how many equal shares each update counts as: ``[n]`` float64, at most ``MOST_SHARES``.

    If a rule equalises lengths, its coefficient ``r`` depends on the length and ``r * length / median`` does not; for a
    mean, it is the other way round. Either way, one of the two is 1 for an update with an equal share, so the median of
    1 and both values is used. An update of zeros adds nothing and counts as zero.
    """
    median = lengths.sort().values[(len(lengths) - 1) // 2]
    added = relative * lengths / median if median > 0.0 else relative
    shares = torch.stack([relative, added, torch.ones_like(relative)]).median(0).values
    return torch.where(lengths > 0.0, shares.clamp(0.0, MOST_SHARES), 0.0)
