"""The torch and numpy reference of every kernel, and the path without native code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LANES = 16
_CHUNK_ROWS_ELEMENTS = 1 << 22
_BLOCK_BYTES = 128
_LEAST = np.float32(1e-30)
"""Minimum of the largest sum of a block; below it, the block counts as zero, since its factor would overflow."""

Array = np.ndarray[Any, Any]


def pack(matrix: Tensor) -> Tensor:
    """Pack ``[rows, cols]`` float32 to ``[rows, ceil(cols / 8)]`` uint8; 1 where the value is >= 0."""
    return torch.from_numpy(np.packbits((matrix >= 0).numpy(), axis=1, bitorder="little"))


def difference(tuned: Tensor, base: Tensor | None, residual: Tensor | None) -> Tensor:
    """Compute ``tuned - base + residual`` in float32, in this order."""
    delta = tuned.to(torch.float32)
    if base is not None:
        delta = delta - base.to(torch.float32)
    return delta if residual is None else delta + residual


def encode(
    tuned: Tensor, base: Tensor | None, group: int | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bits, and sums of magnitudes ``[rows, groups]`` float64 in native code's order of summation."""
    rows, cols = tuned.shape
    bits, sums = [], []
    piece = max(1, _CHUNK_ROWS_ELEMENTS // max(1, cols))
    for start in range(0, rows, piece):
        part = slice(start, start + piece)
        delta = difference(
            tuned[part], None if base is None else base[part], None if residual is None else residual[part]
        )
        bits.append(pack(delta))
        sums.append(_sums(np.abs(delta.numpy()), group or cols))
    return torch.cat(bits), torch.from_numpy(np.concatenate(sums))


def decode(bits: Tensor, scales: Tensor, group: int | None, out: Tensor, add: bool) -> None:
    """Write (or add) ``scale * sign`` into ``out`` ``[rows, cols]`` float32."""
    values = signs(bits, out.shape[1]).mul_(spread(scales, out.shape[1], group))
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def signs(packed: Tensor, cols: int) -> Tensor:
    """Unpack ``[rows, bytes]`` uint8 to ``[rows, cols]`` float32 of +1.0 and -1.0."""
    bits = np.unpackbits(packed.numpy(), axis=1, count=cols, bitorder="little")
    return torch.from_numpy(bits).to(torch.float32).mul_(2.0).sub_(1.0)


def spread(scales: Tensor, cols: int, group: int | None) -> Tensor:
    """Expand scales to a shape that multiplies ``[rows, cols]``."""
    if group is None or scales.ndim < 2 or scales.shape[1] == 1:
        return scales
    return scales.repeat_interleave(group, dim=1)[:, :cols]


def hamming(packed: Tensor) -> Tensor:
    """Compute Hamming distances, ``[n, bytes]`` to ``[n, n]`` int64, of one row and all others at a time."""
    rows = packed.numpy()
    n, width = rows.shape
    out = np.zeros((n, n), dtype=np.int64)
    for at in range(0, width, 1 << 16):
        part = rows[:, at : at + (1 << 16)]
        for i in range(n):
            out[i] += np.bitwise_count(part ^ part[i]).sum(axis=1, dtype=np.int64)
    return torch.from_numpy(out)


def votes(packed: Tensor, weights: Tensor | None) -> Tensor:
    """Count bits: ``[n, bytes]`` to ``[8 * bytes]`` int32."""
    total = torch.zeros(8 * packed.shape[1], dtype=torch.int32)
    for row in range(packed.shape[0]):
        bits = torch.from_numpy(np.unpackbits(packed[row].numpy(), bitorder="little"))
        total.add_(bits, alpha=1 if weights is None else int(weights[row]))
    return total


def majority(packed: Tensor) -> Tensor:
    """Compute majority bits: ``[n, bytes]`` to ``[bytes]``."""
    ones = (2 * votes(packed, None) >= packed.shape[0]).numpy()
    return torch.from_numpy(np.packbits(ones, bitorder="little"))


def exact_matmul(x: Tensor, y: Tensor, bits: Tensor, scales: Tensor, group: int | None) -> None:
    """Compute ``y += x @ (scale * sign)^T`` for rows of one variant, by decoding and torch's matmul."""
    dense = signs(bits, x.shape[1]).mul_(spread(scales, x.shape[1], group))
    y.add_(x @ dense.T)


@dataclass(frozen=True, eq=False)
class Operands:
    """A delta ``scale * (sum of 2**shift * sign over planes - zero) + offset`` for the reference.

    Attributes:
        bits: ``[planes, out, ceil(in / 8)]`` uint8.
        scales: ``[out, groups]`` float32.
        offsets: ``[out, groups]`` float32, or None.
        group: Bytes of a row that share a scale.
        shifts: Shifts of the planes.
        zero: An integer.
    """

    bits: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int
    shifts: tuple[int, ...] = (0,)
    zero: int = 0


def lookup_matmul(x: Tensor, y: Tensor, delta: Operands, wide: bool) -> None:
    """Compute ``exact_matmul`` with sums of four inputs rounded to 8 or (wide) 16 bits, with native arithmetic.

    Every block of 1,024 inputs has its own step, regardless of the groups. Integers are added exactly; their scaled
    sums are added in float32. A row of ``x`` that is not finite makes its row of ``y`` NaN.
    """
    bits, zero = delta.bits, delta.zero
    planes, rows, width = bits.shape
    byte = bits.numpy()
    index = np.stack([byte & 15, byte >> 4], axis=3).reshape(planes, rows, 2 * width)
    for number in range(x.shape[0]):
        codes, steps = lookup_table(x[number].numpy(), width, wide)
        if codes is None:
            y[number] = torch.nan
            continue
        total = np.zeros(rows, dtype=np.float32)
        for block, start in enumerate(range(0, width, _BLOCK_BYTES)):
            end, sums = min(width, start + _BLOCK_BYTES), np.zeros(rows, dtype=np.float32)
            while start < end:
                group = start // delta.group
                stop = min(end, (group + 1) * delta.group)
                nibbles = np.arange(2 * start, 2 * stop)
                ones = int(codes[nibbles, 15].sum())
                count = np.full(rows, -zero * ones, dtype=np.int64)
                for plane, shift in enumerate(delta.shifts):
                    count += codes[nibbles, index[plane][:, nibbles]].sum(axis=1) << shift
                sums += count.astype(np.float32) * delta.scales[:, group].numpy()
                if delta.offsets is not None:
                    sums += np.float32(ones) * delta.offsets[:, group].numpy()
                start = stop
            total += sums * steps[block]
        y[number] += torch.from_numpy(total)


def lookup_table(row: Array, width: int, wide: bool) -> tuple[Array | None, Array]:
    """Return integer tables ``[2 * width, 16]`` of a row (None if it is not finite), and its blocks' steps."""
    inputs = np.zeros((2 * width, 4), dtype=np.float32)
    inputs.reshape(-1)[: len(row)] = row
    top = np.float32(32767 if wide else 127)
    codes, steps = np.zeros((2 * width, 16), dtype=np.int64), []
    for start in range(0, 2 * width, 2 * _BLOCK_BYTES):
        part = slice(start, start + 2 * _BLOCK_BYTES)
        with np.errstate(over="ignore", invalid="ignore"):
            size = np.abs(inputs[part])
            most = np.float32(((size[:, 0] + size[:, 1]) + (size[:, 2] + size[:, 3])).max())
        if not np.isfinite(most):
            return None, np.zeros(0, dtype=np.float32)
        if most > _LEAST:
            codes[part] = np.rint(_sums_of_four(inputs[part]) * (top / most))
        steps.append(most / top if most > _LEAST else np.float32(0))
    return codes, np.array(steps, dtype=np.float32)


def rows_by_variant(index: Sequence[int]) -> dict[int, list[int]]:
    """Group a batch's rows by variant, leaving out rows without one (-1)."""
    rows_of: dict[int, list[int]] = {}
    for row, variant in enumerate(index):
        if variant >= 0:
            rows_of.setdefault(variant, []).append(row)
    return rows_of


def _sums_of_four(four: Array) -> Array:
    """Return sums ``[n, 16]`` of inputs ``[n, 4]`` float32: bit k of the column is 1 where input k is added."""
    j = np.arange(16)
    x0, x1, x2, x3 = (
        np.where(j & (1 << k), four[:, k : k + 1], -four[:, k : k + 1]).astype(np.float32) for k in range(4)
    )
    return (x0 + x1) + (x2 + x3)


def _sums(magnitudes: Array, group: int) -> Array:
    """Return sums ``[rows, groups]`` float64: in 16 lanes by column of the group modulo 16, then of lanes pairwise."""
    rows, cols = magnitudes.shape
    whole = cols // group
    parts = [magnitudes[:, : whole * group].reshape(rows, whole, group)] if whole else []
    if whole * group < cols:
        parts.append(magnitudes[:, None, whole * group :])
    return np.concatenate([_lanes(part) for part in parts], axis=1)


def _lanes(part: Array) -> Array:
    rows, groups, size = part.shape
    steps = -(-size // _LANES)
    wide = np.zeros((rows, groups, steps * _LANES), dtype=np.float32)
    wide[:, :, :size] = part
    lanes = np.add.reduce(
        wide.reshape(rows, groups, steps, _LANES).astype(np.float64), axis=2
    )  # along an outer axis numpy adds one after another
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    return np.asarray(lanes[:, :, 0])
