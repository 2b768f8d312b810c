"""Sign deltas: merged on their packed bits, which are never turned into floats where the rule allows it.

A combination of sign deltas is an integer vote: contributor i's bit counts for a whole number proportional to its
coefficient times its scale. Sums of whole numbers do not depend on their order, so that the soup is the same to the
last bit on every machine and number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gym_quant.kernels import sign_products, signed_combination, signed_trimmed
from torch import Tensor

from gym_fed.delta import DeltaFile
from gym_fed.soup.aggregator import Aggregator, CoordinateRule
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack

COMBINATION_TOTAL = 1 << 30
"""A combination's votes add up to about this, so rounding changes none by more than 1e-9 of the whole."""

TRIMMED_TOTAL = (1 << 15) - 1
"""So do those of every vector that is trimmed coordinate by coordinate: the largest with which 16 bits suffice."""


class SignStack(Stack):
    """Tensors of codec ``bitdelta`` with scales of one shape."""

    def __init__(self, name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...]) -> None:
        super().__init__(name, updates, shape)
        holder = next(update for update in updates if name in update)
        size = holder.record(name).params.get("group_size")
        self.group_size = None if size is None else int(size)
        like = holder.payload(name)
        nothing = (torch.zeros_like(like["bits"]), torch.zeros_like(like["scales"], dtype=torch.float32))
        self.bits: list[Tensor] = []
        self.scales: list[Tensor] = []
        for update in updates:
            found = update.payload(name) if name in update else {"bits": nothing[0], "scales": nothing[1]}
            self.bits.append(found["bits"])
            self.scales.append(found["scales"].to(torch.float32))

    def products(self, factors: Tensor) -> Tensor:
        found = sign_products(self.bits, self.scales, self.cols, self.group_size)
        return found * factors[:, None] * factors[None]

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        if self.group_size is not None or not self._vote(plan, rule, target):
            DecodedStack(self.name, self.updates, self.shape).merge(plan, rule, target)

    def _vote(self, plan: Mixture, rule: Aggregator, target: Tensor) -> bool:
        """Merge by integer votes; False when the rule has no such form."""
        scales = torch.cat(self.scales).to(torch.float64)
        strengths = plan.matrix * scales
        if len(strengths) == 1 and not isinstance(rule, CoordinateRule):
            votes, unit = whole_votes(strengths, COMBINATION_TOTAL)
            signed_combination(self.bits, votes[0], unit, self.cols, out=target)
            return True
        if not isinstance(rule, CoordinateRule):
            return False
        drops = rule.drops(plan.weights)
        if drops is None:
            return False
        votes, unit = whole_votes(strengths, TRIMMED_TOTAL)
        kept = len(strengths) - 2 * drops
        signed_trimmed(self.bits, votes, self.cols, drops, unit / kept, out=target)
        return True


def whole_votes(strengths: Tensor, total: int) -> tuple[Tensor, float]:
    """Whole numbers proportional to strengths.

    Args:
        strengths: ``[m, n]`` float64.
        total: What the magnitudes of a row may add up to.

    Returns:
        ``[m, n]`` int32 votes and the unit, so that ``unit * votes`` is ``strengths`` rounded.
    """
    peak = float(strengths.abs().sum(dim=1).max())
    if peak == 0.0:
        return torch.zeros(strengths.shape, dtype=torch.int32), 0.0
    unit = peak / (total - strengths.shape[1])  # each of n roundings adds at most a half
    return (strengths / unit).round().to(torch.int32), unit
