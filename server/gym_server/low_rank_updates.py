"""LoRA rounds: what is sent must be factors of the round's rank.

The soup stacks what the contributors send and travels to all of them. One update of another codec, or of a far larger
rank, would make everybody's download larger, and is not what the task asks for.
"""

from __future__ import annotations

from gym_quant.registry import get_codec

from gym_fed.config.task import TaskSpec
from gym_fed.delta.file import DeltaFile


def not_low_rank(delta: DeltaFile, spec: TaskSpec) -> str | None:
    """Why a delta is no LoRA update of the round's rank; None where it is one."""
    most = spec.recipe.lora.r
    for name in delta.names:
        record = delta.record(name)
        rank = get_codec(record.codec).rank(record.params)
        if rank is None:
            return f"tensor {name!r} is of codec {record.codec}, and the round asks for LoRA factors"
        if rank > most:
            return f"tensor {name!r} has rank {rank}, and the round's is {most}"
    return None
