"""LoRA rounds: what is sent must be factors of the round's rank, and of the round's A where it is frozen.

The soup stacks what the contributors send and travels to all of them. One update of another codec, or of a far larger
rank, would make everybody's download larger, and is not what the task requires.
"""

from __future__ import annotations

import torch
from gym_quant.registry import get_codec

from gym_fed.config.hub.task import TaskSpec
from gym_fed.delta.file import DeltaFile


def not_low_rank(delta: DeltaFile, spec: TaskSpec) -> str | None:
    """Why a delta is no LoRA update of the round's rank; None where it is one."""
    most = spec.recipe.lora.r
    for name in delta.names:
        record = delta.record(name)
        rank = get_codec(record.codec).rank(record.params)
        if rank is None:
            return f"tensor {name!r} is of codec {record.codec}, and the round takes LoRA factors"
        if rank > most:
            return f"tensor {name!r} has rank {rank}, and the round's is {most}"
    return None


def foreign_a(delta: DeltaFile, spec: TaskSpec) -> str | None:
    """The first tensor whose A is not the one that the round's seed gives; None when all are.

    It must be that of the recipe's rank, stored as the task's codec says: a part of it, or the same numbers in another
    format, are another A. With one A for all, rules on coordinates work on B and are exact. Who sends another one would
    make the whole tensor fall back to decoded merging, and is not doing the round's task.
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
        wanted = frozen_factor(seed, name.removesuffix(".weight"), *a.shape)
        if not torch.equal(a, wanted.to(a.dtype)):
            return name
    return None
