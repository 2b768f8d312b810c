"""Which codec a tensor gets under a policy, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from gym_quant import Params, get_codec
from gym_quant.codec import as_matrix
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.manifest import TensorRecord


@dataclass(frozen=True)
class Choice:
    """A tensor's record, its payload's size, and the reason in words."""

    record: TensorRecord
    payload_bytes: int
    why: str


def choose(name: str, delta: Tensor, policy: CodecPolicy) -> Choice:
    """Pick codec and parameters for one tensor, given its (error-corrected) delta."""
    shape = tuple(delta.shape)
    if len(shape) < 2 or math.prod(shape) <= policy.small_max_elements:
        kind = "one-dimensional" if len(shape) < 2 else f"at most {policy.small_max_elements} elements"
        return _choice(name, delta, policy.small_tensors, policy, f"small ({kind}): small_tensors")
    if policy.codec == "lora" and policy.lora_rank is not None:
        rows, cols = as_matrix(shape)
        if policy.lora_rank * (rows + cols) >= rows * cols:
            return _choice(
                name, delta, "dense", policy, f"factors of rank {policy.lora_rank} would be no smaller"
            )
    return _choice(name, delta, policy.codec, policy, "policy")


def _choice(name: str, delta: Tensor, codec: str, policy: CodecPolicy, why: str) -> Choice:
    shape, member = tuple(delta.shape), get_codec(codec)
    wanted: dict[str, object] = {"dtype": policy.dense_dtype}
    if codec == "lora":
        wanted = {"rank": policy.lora_rank}
    elif codec == "bitdelta":
        wanted = {"group_size": policy.group_size, "scale_dtype": policy.scale_dtype}
        if policy.group_size == "row" or (policy.group_size == "auto" and _rows_are_worth_it(delta, policy)):
            wanted["group_size"] = as_matrix(shape)[1]
            why = (
                why if policy.group_size == "row" else f"{why}; a scale for each row keeps more energy a byte"
            )
        elif policy.group_size == "auto":
            wanted["group_size"] = None
    params: Params = member.normalise(wanted, shape)
    return Choice(TensorRecord(name, shape, codec, params), member.payload_bytes(shape, params), why)


def _rows_are_worth_it(delta: Tensor, policy: CodecPolicy) -> bool:
    """Whether row scales keep more energy per byte they cost than one scale and the bits do.

    Signs and the mean magnitude of n weights keep ``(sum |d|)^2 / n`` of their energy (Liu et al. 2024, eq. 3).
    """
    shape, codec = tuple(delta.shape), get_codec("bitdelta")
    rows, cols = as_matrix(shape)
    if rows == 1:
        return False
    one = codec.normalise({"scale_dtype": policy.scale_dtype}, shape)
    magnitudes = np.abs(delta.reshape(rows, cols).numpy()).sum(axis=1, dtype=np.float64)
    kept_by_one = float(magnitudes.sum()) ** 2 / (rows * cols)
    kept_by_rows = float(np.square(magnitudes).sum()) / cols
    bytes_of_one = codec.payload_bytes(shape, one)
    more_bytes = codec.payload_bytes(shape, {**one, "group_size": cols}) - bytes_of_one
    return (kept_by_rows - kept_by_one) * bytes_of_one > kept_by_one * more_bytes
