"""Pack small codes into planes, the serving layout, which unpacks in a few operations on whole rows.

A byte holds as many codes as fit, ``sum_i code_i * levels**i``, and they stand a plane apart: byte ``j`` of a row has
columns ``j``, ``j + width``, ``j + 2 * width``, ... Planes are unpacked side by side, where codes that are neighbours
in a byte would have to be put between each other. Files keep the order of ``gym_quant.bitstream``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gym_quant.bitstream import Bytes


def codes_a_byte(levels: int) -> int:
    """Number of codes below ``levels`` (2 to 256) that fit into a byte."""
    return next(n for n in range(8, 0, -1) if levels**n <= 256)


def to_planes(codes: Bytes, levels: int) -> Bytes:
    """Pack ``[rows, cols]`` codes below ``levels`` to ``[rows, width]``."""
    rows, cols = codes.shape
    each = codes_a_byte(levels)
    width = -(-cols // each)
    packed = np.zeros((rows, width), dtype=np.uint8)
    for place in range(each):
        part = codes[:, place * width : (place + 1) * width]
        packed[:, : part.shape[1]] += part * np.uint8(levels**place % 256)
    return packed


def from_planes(packed: Tensor, levels: int, cols: int) -> Tensor:
    """Unpack on any device: ``[rows, width]`` uint8 to ``[rows, cols]`` float32."""
    each, width = codes_a_byte(levels), packed.shape[1]
    out = torch.empty(len(packed), cols, device=packed.device)
    planes = [out[:, place * width : (place + 1) * width] for place in range(each)]
    if levels & (levels - 1) == 0:
        for place, plane in enumerate(planes):
            some, bits = packed[:, : plane.shape[1]], 8 // each
            shifted = some >> (place * bits) if place else some
            plane.copy_(shifted & (levels - 1) if place < each - 1 else shifted)
        return out
    left = packed.to(torch.float32)
    for plane in planes:
        above = torch.floor(
            (left + 0.5).mul_(1.0 / levels)
        )  # whole numbers below 256: the half makes it exact
        torch.sub(left[:, : plane.shape[1]], above[:, : plane.shape[1]], alpha=levels, out=plane)
        left = above
    return out
