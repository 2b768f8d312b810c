"""The straight version of each codec in numpy and torch: what one writes in a few lines, as a peer for speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Codes = tuple[Tensor, Tensor, torch.Size]
"""Packed bytes, scales, and the shape of what was packed."""
Packed = tuple[np.ndarray[Any, Any], Tensor, torch.Size]
"""The same, with bytes as numpy packs them."""


@dataclass(frozen=True)
class Straight:
    """``encode(delta, option)`` and ``decode(encoded, option)``; the option is the group size, or LoRA's rank."""

    encode: Callable[[Tensor, Any], Any]
    decode: Callable[[Any, Any], Tensor]


def _grouped(delta: Tensor, group: int | None) -> Tensor:
    return delta.reshape(1, -1) if group is None else delta.reshape(-1, group)


def _encode_signs(delta: Tensor, group: int | None) -> Packed:
    scales = _grouped(delta, group).abs().mean(dim=1, keepdim=True)
    return np.packbits((delta >= 0).numpy(), axis=1, bitorder="little"), scales, delta.shape


def _decode_signs(encoded: Packed, group: int | None) -> Tensor:
    packed, scales, shape = encoded
    bits = np.unpackbits(packed, axis=1, count=shape[1], bitorder="little")
    signs = torch.from_numpy(bits).float() * 2 - 1
    return (_grouped(signs, group) * scales).reshape(shape)


def _uniform(bits: int) -> Straight:
    top = 2 ** (bits - 1) - 1
    per_byte = 8 // bits

    def encode(delta: Tensor, group: int | None) -> Codes:
        wide = _grouped(delta, group)
        scales = wide.abs().amax(dim=1, keepdim=True) / top
        codes = (
            (wide / scales).round().clamp(-top - 1, top).add(top + 1).to(torch.uint8).reshape(-1, per_byte)
        )
        packed = codes[:, 0].clone()
        for place in range(1, per_byte):
            packed |= codes[:, place] << (bits * place)
        return packed, scales, delta.shape

    def decode(encoded: Codes, group: int | None) -> Tensor:
        packed, scales, shape = encoded
        codes = torch.stack([(packed >> (bits * place)) & (2**bits - 1) for place in range(per_byte)], dim=1)
        values = codes.reshape(shape).float() - (top + 1)
        return (_grouped(values, group) * scales).reshape(shape)

    return Straight(encode, decode)


def _encode_ternary(delta: Tensor, group: int | None) -> Codes:
    """Threshold 0.7 of the mean magnitude (Li et al. 2016), five digits a byte."""
    wide = _grouped(delta, group)
    size = wide.abs()
    kept = size > 0.7 * size.mean(dim=1, keepdim=True)
    scales = (size * kept).sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True)
    digits = (wide.sign() * kept + 1).to(torch.uint8).flatten()
    digits = torch.nn.functional.pad(digits, (0, -len(digits) % 5)).reshape(-1, 5)
    packed = digits[:, 0].clone()
    for place in range(1, 5):
        packed += digits[:, place] * 3**place
    return packed, scales, delta.shape


def _decode_ternary(encoded: Codes, group: int | None) -> Tensor:
    packed, scales, shape = encoded
    digits = torch.stack([(packed // 3**place) % 3 for place in range(5)], dim=1).flatten()[: shape.numel()]
    values = digits.reshape(shape).float() - 1
    return (_grouped(values, group) * scales).reshape(shape)


def _encode_factors(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    u, s, v = torch.linalg.svd(delta, full_matrices=False)
    return (u[:, :rank] * s[:rank]).bfloat16(), v[:rank].bfloat16()


STRAIGHT = {
    "binary": Straight(_encode_signs, _decode_signs),
    "bitdelta": Straight(_encode_signs, _decode_signs),
    "dense": Straight(lambda delta, _: delta.bfloat16(), lambda encoded, _: encoded.float()),
    "int2": _uniform(2),
    "int4": _uniform(4),
    "int8": _uniform(8),
    "lora": Straight(_encode_factors, lambda encoded, _: encoded[0].float() @ encoded[1].float()),
    "ternary": Straight(_encode_ternary, _decode_ternary),
}
