"""LoRA factors: products and combinations from the factors alone; the full matrix is formed by blocks, if at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gym_fed.delta import DeltaFile
from gym_fed.soup.aggregator import Aggregator, CoordinateRule
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.low_rank import LowRank, combine, frozen_a, products, rows_of
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import BLOCK_ELEMENTS, DecodedStack, mixed


class FactorStack(Stack):
    """Tensors of codec ``lora``, of any ranks."""

    def __init__(self, name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...]) -> None:
        super().__init__(name, updates, shape)
        self.factors = [
            LowRank.of(update.payload(name), shape, update.record(name).params) if name in update else None
            for update in updates
        ]

    def products(self, factors: Tensor) -> Tensor:
        return products(self.factors) * factors[:, None] * factors[None]

    def combination(self, coefficients: Tensor) -> LowRank:
        """The stacked factors of ``sum_i coefficients[i] * update_i``, ``[n]`` float64."""
        return combine(self.factors, coefficients)

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        if len(plan.matrix) == 1 and not isinstance(rule, CoordinateRule):
            self._fill(self.combination(plan.matrix[0]), target)
            return
        shared = frozen_a(self.factors)
        if shared is None:
            DecodedStack(self.name, self.updates, self.shape).merge(plan, rule, target)
            return
        self._fill(LowRank(shared, self._merge_b(plan, rule, shared.shape[0])), target)

    def _merge_b(self, plan: Mixture, rule: Aggregator, rank: int) -> Tensor:
        """Every contributor trained the same A: what differs is B, on which the rule works as on a small tensor."""
        none = torch.zeros(self.rows, rank, dtype=torch.float64)
        block = torch.stack([(none if f is None else f.b).reshape(-1) for f in self.factors])
        merged = rule.combine(mixed(block.to(torch.float32), plan.matrix), plan.weights)
        return merged.reshape(self.rows, rank).to(torch.float64)

    def _fill(self, found: LowRank, target: Tensor) -> None:
        step = max(1, BLOCK_ELEMENTS // self.cols)
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            target[start:stop] = rows_of(found, start, stop)
