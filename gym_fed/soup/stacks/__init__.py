"""One tensor of every update of a round: as packed signs, as LoRA factors, or decoded block by block."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.soup.stacks.base import Stack
from gym_fed.soup.stacks.decoded import DecodedStack
from gym_fed.soup.stacks.factors import FactorStack
from gym_fed.soup.stacks.signs import SignStack


def stack_of(name: str, updates: Sequence[DeltaFile], shape: tuple[int, ...]) -> Stack:
    """The tensor of all updates (those without it count as zero), in the form that costs the least."""
    records = [update.record(name) for update in updates if name in update]
    codecs = {record.codec for record in records}
    if codecs == {"bitdelta"} and len({record.params.get("group_size") for record in records}) == 1:
        return SignStack(name, updates, shape)
    if codecs == {"lora"}:
        return FactorStack(name, updates, shape)
    return DecodedStack(name, updates, shape)


def stacks_of(updates: Sequence[DeltaFile], spec: BaseSpec) -> list[Stack]:
    """Every tensor of the base that an update holds, by name."""
    held = {name for update in updates for name in update.names}
    return [stack_of(name, updates, tuple(spec.shapes[name])) for name in sorted(held)]
