"""Sign deltas: merged on their packed bits, which are never turned into floats where the rule allows it.

A combination of sign deltas is an integer vote: contributor i's bit counts for a whole number proportional to its
coefficient times its scale (``gym_fed.soup.signs``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gym_quant import Payload
from gym_quant.kernels import sign_products
from torch import Tensor

from gym_fed.delta import DeltaFile
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack


class SignStack(Stack):
    """Tensors of codec ``bitdelta`` with scales of one shape."""

    def __init__(self, name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...]) -> None:
        super().__init__(name, updates, shape)
        holder = next(update for update in updates if name in update)
        size = holder.record(name).params.get("group_size")
        self.group_size = None if size is None else int(size)
        found = [update.payload(name) if name in update else None for update in updates]
        nothing: Payload = {}
        if None in found:
            nothing = {field: torch.zeros_like(tensor) for field, tensor in holder.payload(name).items()}
        self.bits = [(nothing if payload is None else payload)["bits"] for payload in found]
        self.scales = [(nothing if payload is None else payload)["scales"].float() for payload in found]

    def products(self, factors: Tensor) -> Tensor:
        found = sign_products(self.bits, self.scales, self.cols, self.group_size)
        return found * factors[:, None] * factors[None]

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        if self.group_size is None:
            strengths = plan.matrix * torch.cat(self.scales).to(torch.float64)
            if rule.combine_signs(self.bits, strengths, plan.weights, target):
                return
        DecodedStack(self.name, self.updates, self.shape).merge(plan, rule, target)
