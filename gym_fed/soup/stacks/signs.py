"""Sign deltas: merged on their packed bits, which are never turned into floats where the rule allows it.

A combination of sign deltas is an integer vote: contributor i's bit counts for a whole number proportional to its
coefficient times its scale (``gym_fed.soup.signs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from gym_quant import Payload
from gym_quant.kernels import sign_products
from torch import Tensor

from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack

_KEPT_ELEMENTS = 1 << 21


class SignStack(Stack):
    """Tensors of codec ``bitdelta`` with scales of one shape."""

    def __init__(self, name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...]) -> None:
        super().__init__(name, updates, shape)
        self._holder = next(update for update in updates if name in update)
        size = self._holder.record(name).params.get("group_size")
        self.group_size = None if size is None else int(size)

    @cached_property
    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Bits and float32 scales of every update: views of the files, but for what an update lacks."""
        found = [update.payload(self.name) if self.name in update else None for update in self.updates]
        nothing: Payload = {}
        if None in found:
            like = self._holder.payload(self.name)
            nothing = {field: torch.zeros_like(tensor) for field, tensor in like.items()}
        full = [nothing if payload is None else payload for payload in found]
        return [payload["bits"] for payload in full], [payload["scales"].float() for payload in full]

    @property
    def bits(self) -> list[Tensor]:
        return self._parts[0]

    @property
    def scales(self) -> list[Tensor]:
        return self._parts[1]

    def release(self) -> None:
        if (
            self.rows * self.cols >= _KEPT_ELEMENTS
        ):  # the views of small tensors cost more to make than to keep
            self.__dict__.pop("_parts", None)
        super().release()

    def products(self, factors: Tensor) -> Tensor:
        found = sign_products(self.bits, self.scales, self.cols, self.group_size)
        return found * factors[:, None] * factors[None]

    def merge(self, plan: Mixture, rule: Aggregator, target: Tensor) -> None:
        if self.group_size is None:
            strengths = plan.matrix * torch.cat(self.scales).to(torch.float64)
            if rule.combine_signs(self.bits, strengths, plan.weights, target):
                return
        DecodedStack(self.name, self.updates, self.shape).merge(plan, rule, target)
