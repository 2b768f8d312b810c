"""LoRA factors: products and combinations from the factors alone; the full matrix is formed by blocks, if at all."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gym_fed.soup.aggregator import Aggregator, CoordinateRule
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.low_rank import LowRank, combine, frozen_a, powers_of_two, products, rows_of
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import BLOCK_ELEMENTS, DecodedStack


class FactorStack(Stack):
    """Tensors that are factors (``Codec.factors``), of any ranks."""

    @cached_property
    def factors(self) -> list[LowRank | None]:
        """Every update's factors in float64, None for one that leaves the tensor out; held until ``release``.

        That is eight bytes a number, for all updates' factors of this one tensor together.
        """
        return [
            LowRank.of(update.payload(self.name), update.record(self.name)) if self.name in update else None
            for update in self.updates
        ]

    def release(self) -> None:
        self.__dict__.pop("factors", None)
        super().release()

    def products(self, factors: Tensor) -> Tensor:
        """Factors are multiplied first: far below 2**-480 a product of numbers would lose their bits."""
        scaled = [
            None if update is None else LowRank(update.a, update.b * factor)
            for update, factor in zip(self.factors, factors.tolist(), strict=True)
        ]
        return products(scaled)

    def merged(self, plan: Mixture, rule: Aggregator) -> LowRank | None:
        """The result as factors: stacked ones where the rule weighs whole updates, one A and a merged B where all
        trained one A; None for a rule on coordinates of updates whose A differ."""
        if len(plan.matrix) == 1 and not isinstance(rule, CoordinateRule):
            return combine(self.factors, plan.matrix[0])
        shared = frozen_a(self.factors)
        return None if shared is None else LowRank(shared, self._merge_b(plan, rule, shared))

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        found = self.merged(plan, rule)
        if found is None:
            DecodedStack(self.name, self.updates, self.shape, self.version).merge(plan, rule, target)
            return
        step = max(1, BLOCK_ELEMENTS // self.cols)
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            target[start:stop] = rows_of(found, start, stop)

    def _merge_b(self, plan: Mixture, rule: Aggregator, shared: Tensor) -> Tensor:
        """Every contributor trained the same A: what differs is B, on which the rule works as on a small tensor.

        B is seen in units of the product (its components times powers of two of A's), which float32 holds, while a B
        beside a small A may exceed it; what the rule does to each coordinate alone does not depend on the unit.
        """
        rank = len(shared)
        none = torch.zeros(self.rows, rank, dtype=torch.float64)
        units = powers_of_two(shared)
        block = torch.stack(
            [none.reshape(-1) if f is None else (f.b * units).reshape(-1) for f in self.factors]
        )
        rows = _mixed(block, plan).to(torch.float32)
        return rule.combine(rows, plan.weights).reshape(self.rows, rank).to(torch.float64) / units


def _mixed(block: Tensor, plan: Mixture) -> Tensor:
    """What a plan makes of ``[n, d]`` float64, in float64."""
    diagonal = plan.matrix.diagonal()
    if plan.matrix.shape[0] == plan.matrix.shape[1] and torch.equal(plan.matrix, torch.diag(diagonal)):
        return block * diagonal[:, None]
    return plan.applied(block)
