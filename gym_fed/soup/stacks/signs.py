"""Sign deltas: merged on their packed bits, which are never turned into floats where the rule allows it.

A combination of sign deltas is an integer vote: contributor i's bit counts for a whole number proportional to its
coefficient times its scale (``gym_fed.soup.signs``).
"""

from __future__ import annotations

from functools import cached_property

import torch
from gym_quant.kernels import sign_products
from gym_quant.registry import get_codec
from torch import Tensor

from gym_fed.delta.file import DeltaFile
from gym_fed.soup.aggregator import Aggregator
from gym_fed.soup.geometry import Mixture
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack

_KEPT_ELEMENTS = 1 << 21


class SignStack(Stack):
    """Tensors that are exactly signs and scales (``Codec.signs``), whatever their codecs, with groups of one size."""

    @cached_property
    def group_size(self) -> int | None:
        """Columns that share a scale; None for one scale a tensor."""
        record = next(update.record(self.name) for update in self.updates if self.name in update)
        return get_codec(record.codec).merge_form(record.shape, record.params).group_size

    @cached_property
    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Bits and float32 scales of every update: views of the files, but for what an update lacks."""
        found = [_signs(update, self.name) if self.name in update else None for update in self.updates]
        like = next(one for one in found if one is not None)
        nothing = (torch.zeros_like(like[0]), torch.zeros_like(like[1])) if None in found else like
        full = [nothing if one is None else one for one in found]
        return [bits for bits, _ in full], [scales for _, scales in full]

    @property
    def bits(self) -> list[Tensor]:
        return self._parts[0]

    @property
    def scales(self) -> list[Tensor]:
        return self._parts[1]

    def release(self) -> None:
        if self.rows * self.cols >= _KEPT_ELEMENTS:  # views of small tensors cost more to make than to keep
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
        DecodedStack(self.name, self.updates, self.shape, self.version).merge(plan, rule, target)


def _signs(update: DeltaFile, name: str) -> tuple[Tensor, Tensor]:
    record = update.record(name)
    found = get_codec(record.codec).signs(update.payload(name), record.shape, record.params)
    if found is None:
        raise TypeError(f"codec {record.codec!r} says that it merges as signs, but gives none")
    return found.bits, found.scales
