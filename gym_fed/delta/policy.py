"""Which codec a tensor gets under a policy, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gym_quant import Params, get_codec
from gym_quant.codec import as_matrix

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.manifest import TensorRecord


@dataclass(frozen=True)
class Choice:
    """A tensor's record, its payload's size, and the reason in words."""

    record: TensorRecord
    payload_bytes: int
    why: str


def choose(name: str, shape: tuple[int, ...], policy: CodecPolicy) -> Choice:
    """Pick codec and parameters for one tensor."""
    if len(shape) < 2 or math.prod(shape) <= policy.small_max_elements:
        kind = "one-dimensional" if len(shape) < 2 else f"at most {policy.small_max_elements} elements"
        return _choice(name, shape, policy.small_tensors, policy, f"small ({kind}): small_tensors")
    if policy.codec == "lora" and policy.lora_rank is not None:
        rows, cols = as_matrix(shape)
        if policy.lora_rank * (rows + cols) >= rows * cols:
            return _choice(
                name, shape, "dense", policy, f"factors of rank {policy.lora_rank} would be no smaller"
            )
    return _choice(name, shape, policy.codec, policy, "policy")


def _choice(name: str, shape: tuple[int, ...], codec: str, policy: CodecPolicy, why: str) -> Choice:
    wanted: dict[str, object] = {"dtype": policy.dense_dtype}
    if codec == "bitdelta":
        wanted = {"group_size": policy.group_size, "scale_dtype": policy.scale_dtype}
    elif codec == "lora":
        wanted = {"rank": policy.lora_rank}
    member = get_codec(codec)
    params: Params = member.normalise(wanted, shape)
    return Choice(TensorRecord(name, shape, codec, params), member.payload_bytes(shape, params), why)
