"""Pack the signs of a matrix, encode them with their scales in one pass, and decode them.

Bit order, fixed by format version 1: bit = 1 where the value is >= 0 (-0.0 is); bits run along the last dimension,
least significant first; every row is padded to a whole byte with zero bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native, reference


def pack_signs(matrix: Tensor) -> Tensor:
    """Pack ``[rows, cols]`` floats (CPU) to ``[rows, ceil(cols / 8)]`` uint8; 1 where the value is >= 0.

    Raises:
        CodecError: If ``matrix`` is not two-dimensional.
    """
    _matrix(matrix, "matrix")
    chosen = dispatch.path()
    dense = matrix.detach().to(torch.float32).contiguous()
    return reference.pack(dense) if chosen == "torch" else native.pack(chosen, dense)


def unpack_signs(packed: Tensor, cols: int) -> Tensor:
    """Unpack ``[rows, ceil(cols / 8)]`` uint8 to ``[rows, cols]`` float32 of +1.0 and -1.0.

    Raises:
        CodecError: If the width does not match ``cols``.
    """
    return decode_signs(packed, torch.ones(1), cols)


def encode_signs(
    tuned: Tensor, base: Tensor | None, group_size: int | None = None, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Encode signs and mean magnitudes of ``tuned - base + residual`` in one pass over memory.

    A group's magnitudes are summed in float64 in 16 lanes on every path and for any number of threads, so that scales
    agree to the last bit.

    Args:
        tuned: ``[rows, cols]`` on the CPU; dtypes other than float32 and bfloat16 are converted.
        base: ``[rows, cols]``; ``None`` if ``tuned`` is the delta itself.
        group_size: Columns that share a scale; ``None`` for one scale per tensor.
        residual: The residual of error feedback, ``[rows, cols]``.

    Returns:
        Bits ``[rows, ceil(cols / 8)]`` uint8, and scales float32: ``[1]``, or ``[rows, ceil(cols / group_size)]``.

    Raises:
        CodecError: For shapes that differ, and a delta that is not finite (the message names the flat index).
    """
    _matrix(tuned, "tuned")
    for name, other in (("base", base), ("residual", residual)):
        if other is not None and other.shape != tuned.shape:
            raise CodecError(f"{name} is {list(other.shape)}, not {list(tuned.shape)} as the tuned tensor")
    if tuned.numel() == 0:
        raise CodecError(f"shape {list(tuned.shape)} has no elements")
    _group(group_size)
    rows, cols = tuned.shape
    group = None if group_size is None else min(group_size, cols)
    inputs = (_plain(tuned), None if base is None else _plain(base))
    carried = None if residual is None else residual.detach().to(torch.float32).contiguous()
    chosen = dispatch.path()
    if chosen == "torch":
        bits, sums = reference.encode(*inputs, group, carried)
    else:
        bits, sums = native.encode(chosen, *inputs, group, carried)
    if not bool(torch.isfinite(sums).all()):
        _refuse_first_not_finite(*inputs, carried, sums)
    return bits, _scales(sums.numpy(), rows, cols, group)


def decode_signs(
    bits: Tensor,
    scales: Tensor,
    cols: int,
    group_size: int | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Decode to ``scale * sign``, ``[rows, cols]`` float32; the inverse of ``encode_signs``.

    Args:
        bits: ``[rows, ceil(cols / 8)]`` uint8.
        scales: ``[1]``, or ``[rows, ceil(cols / group_size)]``; any float dtype.
        cols: Columns of the matrix.
        group_size: Columns that share a scale.
        out: ``[rows, cols]`` float32, contiguous, to write into; made here when ``None``.
        add: Add to ``out`` instead of overwriting it.

    Raises:
        CodecError: For shapes that do not match, and ``add`` without ``out``.
    """
    _matrix(bits, "bits")
    _group(group_size)
    rows = bits.shape[0]
    group = None if group_size is None else min(group_size, max(cols, 1))
    if bits.dtype != torch.uint8 or bits.shape[1] != (cols + 7) // 8:
        raise CodecError(f"bits are {list(bits.shape)} {bits.dtype}, which does not match {cols} columns")
    expected = [1] if group is None else [rows, -(-cols // group)]
    if list(scales.shape) != expected:
        raise CodecError(f"scales are {list(scales.shape)}, not {expected}")
    if out is None:
        if add:
            raise CodecError("add=True needs the tensor to add to: pass out")
        out = torch.empty(rows, cols)
    elif list(out.shape) != [rows, cols] or out.dtype != torch.float32 or not out.is_contiguous():
        raise CodecError(f"out is {list(out.shape)} {out.dtype}, not a contiguous float32 {[rows, cols]}")
    chosen = dispatch.path()
    plain = (bits.contiguous(), scales.detach().to(torch.float32).contiguous())
    if chosen == "torch":
        reference.decode(*plain, group, out, add)
    else:
        native.decode(chosen, *plain, group, out, add)
    return out


def _scales(sums: reference.Array, rows: int, cols: int, group: int | None) -> Tensor:
    """Compute means from sums of magnitudes ``[rows, groups]`` float64."""
    if group is None:
        total = np.cumsum(sums[:, 0])[-1]  # row by row, for the same order everywhere
        return torch.tensor([total / (rows * cols)], dtype=torch.float32)
    counts = np.full(sums.shape[1], float(group))
    counts[-1] = cols - group * (sums.shape[1] - 1)
    return torch.from_numpy((sums / counts).astype(np.float32))


def _refuse_first_not_finite(
    tuned: Tensor, base: Tensor | None, residual: Tensor | None, sums: Tensor
) -> None:
    row = int((~torch.isfinite(sums)).any(dim=1).nonzero()[0, 0])
    part = slice(row, row + 1)
    delta = reference.difference(
        tuned[part], None if base is None else base[part], None if residual is None else residual[part]
    )[0]
    column = int((~torch.isfinite(delta)).nonzero()[0, 0])
    at = row * tuned.shape[1] + column
    raise CodecError(f"delta is not finite: {float(delta[column])} at flat index {at}")


def _plain(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return (detached if detached.dtype == torch.bfloat16 else detached.to(torch.float32)).contiguous()


def _matrix(tensor: Tensor, name: str) -> None:
    if tensor.ndim != 2 or tensor.device.type != "cpu":
        raise CodecError(f"{name} is {list(tensor.shape)} on {tensor.device}, not a matrix on the CPU")


def _group(group_size: int | None) -> None:
    if group_size is not None and group_size < 1:
        raise CodecError(f"group_size is {group_size}, not a positive integer")
