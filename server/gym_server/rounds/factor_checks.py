"""Checks that an update consists of the LoRA factors that its task asks for."""

from __future__ import annotations

import torch
from gym_quant.registry import get_codec

from gym_fed.config.hub.task import TaskSpec
from gym_fed.delta.file import DeltaFile


def not_low_rank(delta: DeltaFile, spec: TaskSpec) -> str | None:
    """Return why a delta is not a LoRA update of the round's rank; None if it is one.

    The soup stacks the contributors' factors and is sent to all of them. One update with a different codec or a larger
    rank would make everybody's download larger.
    """
    most = spec.recipe.lora.r
    for name in delta.names:
        record = delta.record(name)
        rank = get_codec(record.codec).rank(record.params)
        if rank is None:
            return f"tensor {name!r} uses codec {record.codec}, but the round requires LoRA factors"
        if rank > most:
            return f"tensor {name!r} has rank {rank}, over the round's rank of {most}"
    return None


def foreign_a(delta: DeltaFile, spec: TaskSpec) -> str | None:
    """Return the first tensor whose A differs from the one that the round's seed generates; None if there is none.

    A must have the recipe's rank and the format of the task's codec; a part of A, or the same numbers in another
    format, counts as different. With the same A in all updates, coordinate-wise rules work on B and are exact. A
    different A would force the whole tensor to be decoded for the merge.
    """
    from gym_fed.training.tuning.lora import frozen_factor

    seed = spec.recipe.seed + spec.server_round
    for name in delta.names:
        record = delta.record(name)
        factors = get_codec(record.codec).factors(delta.payload(name), record.shape, record.params)
        if factors is None:
            return name
        a = factors[0]
        if a.shape[0] != spec.recipe.lora.r or a.dtype != getattr(torch, spec.codec.factors):
            return name
        expected = frozen_factor(seed, name.removesuffix(".weight"), *a.shape)
        if not torch.equal(a, expected.to(a.dtype)):
            return name
    return None
