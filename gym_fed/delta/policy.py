"""Which codec a tensor gets under a policy, and why."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from gym_quant import Params, get_codec
from gym_quant.codec import as_matrix
from gym_quant.factors import components_of_matrix, plan_factors
from gym_quant.levels import LevelCodec
from gym_quant.sides import GROUP
from torch import Tensor

from gym_fed.config.delta import CodecPolicy
from gym_fed.delta.manifest import TensorRecord

FACTOR_BITS = 1.75
"""Bits for each element of trained factors where ``factors: auto`` names none: 8 times smaller than float16 with
the file's header."""

_EMBEDDING = re.compile(r"(^|[._])(embed(?!_out)\w*|\w*embeddings?|wte|wpe)(\.|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)(\.|$)")


@dataclass(frozen=True)
class Choice:
    """A tensor's record, its payload's size, and the reason in words."""

    record: TensorRecord
    payload_bytes: int
    why: str


def part_of(name: str, shape: tuple[int, ...]) -> str:
    """``embeddings``, ``head`` or ``body``, by the name that models of transformers give a matrix.

    Heads are ``lm_head`` and ``embed_out``; embeddings are parts of the name that begin or end with ``embed`` or
    ``embeddings``, and GPT-2's ``wte`` and ``wpe``. A head that is tied to the embeddings is listed once, as them.
    """
    if len(shape) != 2:
        return "body"
    if _HEAD.search(name):
        return "head"
    return "embeddings" if _EMBEDDING.search(name) else "body"


def choose(name: str, delta: Tensor, policy: CodecPolicy) -> Choice:
    """Pick codec and parameters for one tensor, given its (error-corrected) delta."""
    shape = tuple(delta.shape)
    if len(shape) < 2 or math.prod(shape) <= policy.small_max_elements:
        kind = "one-dimensional" if len(shape) < 2 else f"at most {policy.small_max_elements} elements"
        return choice_of(name, delta, policy.small_tensors, policy, f"small ({kind}): small_tensors")
    part = part_of(name, shape)
    own = {"embeddings": policy.embeddings, "head": policy.head}.get(part, "same")
    if own != "same":
        return choice_of(name, delta, own, policy, f"{part}: {own}")
    if policy.codec == "auto":
        return choice_of(name, delta, "bitdelta", policy, "auto: sign bits, 16 times smaller than bfloat16")
    if policy.codec == "lora" and policy.lora_rank is not None:
        return _low_rank(name, delta, policy, policy.lora_rank)
    if policy.codec == "as-merged":
        return choice_of(name, delta, "dense", policy, "as merged: no factors, the values themselves")
    return choice_of(name, delta, policy.codec, policy, "policy")


def choice_of(name: str, delta: Tensor, codec: str, policy: CodecPolicy, why: str) -> Choice:
    """A codec (or ``bitdelta-row``) with the policy's parameters."""
    shape, member = tuple(delta.shape), get_codec(codec.removesuffix("-row"))
    cols = as_matrix(shape)[1]
    wanted: dict[str, object] = {"dtype": policy.dense_dtype}
    if isinstance(member, LevelCodec):
        group: int | None = policy.group_size if isinstance(policy.group_size, int) else cols
        if policy.group_size == "tensor":
            group = None
        wanted = {"group_size": group, "scale_dtype": policy.scale_dtype, "symmetric": policy.symmetric}
    elif member.name == "bitdelta":
        columns = policy.group_size if isinstance(policy.group_size, int) else None
        wanted = {"group_size": columns, "scale_dtype": policy.scale_dtype}
        if codec == "bitdelta-row" or policy.group_size == "row":
            wanted["group_size"] = cols
        elif policy.group_size == "auto" and _rows_are_worth_it(delta, policy):
            wanted["group_size"] = cols
            why = f"{why}; a scale for each row keeps more energy a byte"
    params: Params = member.normalise(wanted, shape)
    return Choice(TensorRecord(name, shape, member.name, params), member.payload_bytes(shape, params), why)


def against_sign_bits(shape: tuple[int, ...], payload_bytes: int) -> str:
    """How a payload compares with one sign bit for each weight of the product, in words."""
    bits = get_codec("bitdelta").payload_bytes(shape, {})
    if payload_bytes <= bits:
        return f"{bits / payload_bytes:.1f} times smaller than the product's sign bits"
    return f"{payload_bytes / bits:.1f} times larger than the product's sign bits"


def _low_rank(name: str, delta: Tensor, policy: CodecPolicy, rank: int) -> Choice:
    """Truncated factors; the values themselves where factors would be no smaller."""
    shape = tuple(delta.shape)
    rows, cols = as_matrix(shape)
    if rank * (rows + cols) >= rows * cols:
        return choice_of(name, delta, "dense", policy, f"factors of rank {rank} would be no smaller")
    wanted: dict[str, object] = {"rank": rank, "factors": policy.factors}
    group = policy.factor_group_size or GROUP
    if policy.factors == "auto" and not delta.is_meta:
        budget = int((policy.factor_bits or FACTOR_BITS) * rank * (rows + cols) / 8)
        plans = plan_factors({name: components_of_matrix(delta, rank)}, budget, group)
        if name not in plans:
            why = f"no component of rank {rank} fits {budget} bytes: sign bits"
            return choice_of(name, delta, "bitdelta", policy, why)
        wanted = {"rank": plans[name][0], "factors": plans[name][1], "factor_group_size": group}
    elif policy.factors == "auto":  # an estimate without values: at most what the finest grid takes
        wanted = {"rank": rank, "factors": "int8", "factor_group_size": group}
    elif policy.quantises_factors:
        wanted = {"rank": rank, "factors": policy.factors, "factor_group_size": group}
    member = get_codec("lora")
    params = member.normalise(wanted, shape)
    size = member.payload_bytes(shape, params)
    return Choice(
        TensorRecord(name, shape, "lora", params), size, f"policy; factors {against_sign_bits(shape, size)}"
    )


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
