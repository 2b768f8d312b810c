"""Merge packed signs robustly: distances, votes, inner products, weighted sums, and trimmed means of combinations.

The rows are whole tensors, one per contributor, in any memory (such as mapped files). Native code reads each row once,
in blocks of all rows that fit into the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, mixing_reference, native, reference

_INT32 = (1 << 31) - 1


def sign_products(
    bits: Sequence[Tensor], scales: Sequence[Tensor], cols: int, group_size: int | None
) -> Tensor:
    """Compute inner products of decoded deltas: ``sum s_ig s_jg (len_g - 2 hamming_ijg)`` over rows and groups.

    Bits are counted exactly and terms are added in float64, by ascending row and group, so all paths agree to the last
    bit. Groups that do not begin at whole bytes are computed by the reference.

    Args:
        bits: ``n`` times ``[rows, ceil(cols / 8)]`` uint8, padding bits zero (``gym_quant.packing``).
        scales: ``n`` times ``[1]``, or ``[rows, ceil(cols / group_size)]``; float32 or shorter.
        cols: Columns of the matrix.
        group_size: Columns that share a scale; ``None`` for one scale per tensor.

    Returns:
        ``[n, n]`` float64, symmetric.

    Raises:
        CodecError: For shapes and dtypes that do not fit each other.
    """
    packed = _packed(bits, cols)
    rows = packed[0].shape[0]
    if group_size is not None and group_size < 1:
        raise CodecError(f"group_size is {group_size}, not a positive integer")
    group = None if group_size is None else min(group_size, max(cols, 1))
    expected = [1] if group is None else [rows, -(-cols // group)]
    if len(scales) != len(packed):
        raise CodecError(f"scales are given for {len(scales)} tensors, bits for {len(packed)}")
    for number, scale in enumerate(scales):
        if list(scale.shape) != expected or not scale.dtype.is_floating_point or scale.dtype == torch.float64:
            raise CodecError(
                f"scales[{number}] are {list(scale.shape)} {scale.dtype}, not {expected} float32 or bfloat16"
            )
    plain = [scale.detach().to("cpu", torch.float32).contiguous() for scale in scales]
    chosen = dispatch.path()
    if chosen == "torch" or (group is not None and group % 8 and group < cols):
        return mixing_reference.sign_products(packed, plain, cols, group)
    return native.sign_products(chosen, packed, plain, cols, group)


def signed_votes(bits: Sequence[Tensor], weights: Tensor, cols: int, out: Tensor | None = None) -> Tensor:
    """Compute ``sum_i weights[i] * sign_i`` at every position, in integers.

    Args:
        bits: ``n`` times ``[rows, ceil(cols / 8)]`` uint8.
        weights: ``[n]`` integers of any sign whose magnitudes sum to less than 2^31. Native code adds 512
            positions at once for every nonzero digit of a weight, so equal weights are the fastest.
        cols: Columns of the matrix.
        out: ``[rows, cols]`` int32, contiguous, to write into; made here when ``None``.

    Returns:
        ``[rows, cols]`` int32.

    Raises:
        CodecError: For shapes and dtypes that do not fit, and for sums that could overflow.
    """
    packed, whole = _packed(bits, cols), _weights(bits, weights)
    out = _out(out, packed[0].shape[0], cols, torch.int32)
    chosen = dispatch.path()
    compute = mixing_reference.signed_votes if chosen == "torch" else native.signed_votes
    compute(chosen, packed, whole, out, 1.0)
    return out


def signed_combination(
    bits: Sequence[Tensor], weights: Tensor, unit: float, cols: int, out: Tensor | None = None
) -> Tensor:
    """Compute ``unit * sum_i weights[i] * sign_i``: the integer sum of ``signed_votes`` times ``unit``, rounded once.

    Args:
        bits: ``n`` times ``[rows, ceil(cols / 8)]`` uint8.
        weights: ``[n]`` integers as for ``signed_votes``.
        unit: Value of a weight of one; multiplied in float64.
        cols: Columns of the matrix.
        out: ``[rows, cols]`` float32, contiguous, to write into; made here when ``None``.

    Returns:
        ``[rows, cols]`` float32.

    Raises:
        CodecError: As in ``signed_votes``, and for a unit that is not finite.
    """
    packed, whole = _packed(bits, cols), _weights(bits, weights)
    out = _out(out, packed[0].shape[0], cols, torch.float32)
    _finite(unit)
    chosen = dispatch.path()
    compute = mixing_reference.signed_votes if chosen == "torch" else native.signed_votes
    compute(chosen, packed, whole, out, unit)
    return out


def signed_trimmed(
    bits: Sequence[Tensor], mixing: Tensor, cols: int, trim: int, unit: float, out: Tensor | None = None
) -> Tensor:
    """Compute coordinate-wise trimmed sums of combinations of signs, times ``unit``.

    At every position, row k of ``mixing`` gives ``y_k = sum_j mixing[k, j] * sign_j``. The ``trim`` largest and the
    ``trim`` smallest are dropped; the rest are summed as integers, multiplied by ``unit`` in float64 and rounded
    once. If each row of ``mixing`` has a contributor's nearest neighbours, this is the trimmed mean after
    nearest-neighbour mixing (Allouah et al. 2023, "Fixing by Mixing", arXiv 2302.01772); a diagonal gives the plain
    trimmed mean, and ``trim = (m - 1) // 2`` the median. ``unit`` must include ``1 / (m - 2 trim)``.

    If the magnitudes of every row of ``mixing`` sum to at most 32,767, native code computes in 16 bits; otherwise in
    32, half as fast. For example, 26 neighbours may have weights of 10 bits (up to 1,260). A row costs one addition per
    weight, or per difference from its columns' usual weights if those are fewer; equal rows cost once. Up to 64 rows
    are sorted by a network in registers; more are trimmed by counting, two to four times slower.

    Args:
        bits: ``n`` times ``[rows, ceil(cols / 8)]`` uint8.
        mixing: ``[m, n]`` integers; the magnitudes of a row sum to less than 2^31.
        cols: Columns of the matrix.
        trim: Number of values dropped at each end; ``2 * trim < m``.
        unit: Value of a weight of one.
        out: ``[rows, cols]`` float32, contiguous, to write into; made here when ``None``.

    Returns:
        ``[rows, cols]`` float32.

    Raises:
        CodecError: For shapes and dtypes that do not fit, for sums that could overflow, for a ``trim`` that leaves
            nothing, and for a unit that is not finite.
    """
    packed = _packed(bits, cols)
    if mixing.ndim != 2 or mixing.shape[1] != len(packed) or not len(mixing) or not _is_whole(mixing):
        raise CodecError(f"mixing is {list(mixing.shape)} {mixing.dtype}, not [m, {len(packed)}] integers")
    wide = mixing.detach().to("cpu", torch.int64)
    for k, row in enumerate(wide):
        _no_overflow(row, f"row {k} of mixing")
    if not 0 <= 2 * trim < len(mixing):
        raise CodecError(
            f"trim is {trim}: of {len(mixing)} rows at most {(len(mixing) - 1) // 2} can be trimmed at each end"
        )
    out = _out(out, packed[0].shape[0], cols, torch.float32)
    _finite(unit)
    chosen = dispatch.path()
    compute = mixing_reference.signed_trimmed if chosen == "torch" else native.signed_trimmed
    compute(chosen, packed, wide.to(torch.int32).contiguous(), trim, unit, out)
    return out


def _packed(bits: Sequence[Tensor], cols: int) -> list[Tensor]:
    if not len(bits):
        raise CodecError("bits are empty: at least one contributor is needed")
    if cols < 1:
        raise CodecError(f"cols is {cols}, not a positive integer")
    expected = [bits[0].shape[0] if bits[0].ndim else 0, (cols + 7) // 8]
    for number, matrix in enumerate(bits):
        if list(matrix.shape) != expected or matrix.dtype != torch.uint8 or matrix.device.type != "cpu":
            raise CodecError(
                f"bits[{number}] are {list(matrix.shape)} {matrix.dtype} on {matrix.device}, "
                f"not {expected} uint8 on the CPU ({cols} columns)"
            )
    return [matrix.contiguous() for matrix in bits]


def _weights(bits: Sequence[Tensor], weights: Tensor) -> Tensor:
    if list(weights.shape) != [len(bits)] or not _is_whole(weights):
        raise CodecError(f"weights are {list(weights.shape)} {weights.dtype}, not [{len(bits)}] integers")
    wide = weights.detach().to("cpu", torch.int64)
    _no_overflow(wide, "weights")
    return wide.to(torch.int32).contiguous()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _no_overflow(wide: Tensor, name: str) -> None:
    size = sum(abs(int(value)) for value in wide.tolist())
    if size > _INT32:
        raise CodecError(f"{name}: magnitudes sum to {size}, more than {_INT32}; use smaller integers")


def _finite(unit: float) -> None:
    if not math.isfinite(unit):
        raise CodecError(f"unit is {unit}, not finite")


def _out(out: Tensor | None, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    if out is None:
        return torch.empty(rows, cols, dtype=dtype)
    if list(out.shape) != [rows, cols] or out.dtype != dtype or not out.is_contiguous() or out.is_cuda:
        raise CodecError(
            f"out is {list(out.shape)} {out.dtype} on {out.device}, not a contiguous {dtype} {[rows, cols]}"
        )
    return out


def hamming(packed: Tensor) -> Tensor:
    """Compute pairwise Hamming distances of packed rows.

    Args:
        packed: ``[n, bytes]`` uint8; padding bits count (they are zero in format version 1).

    Returns:
        ``[n, n]`` int64, symmetric with a zero diagonal.
    """
    rows = _packed_rows(packed)
    chosen = dispatch.path()
    return reference.hamming(rows) if chosen == "torch" else native.hamming(chosen, rows)


def votes(packed: Tensor, weights: Tensor | None = None) -> Tensor:
    """Count the rows whose bit is 1 at each position, or sum their weights.

    Args:
        packed: ``[n, bytes]`` uint8.
        weights: ``[n]`` integers whose magnitudes sum to less than 2^31.

    Returns:
        ``[8 * bytes]`` int32, least significant bit of a byte first.

    Raises:
        CodecError: For weights of a different shape or dtype, and sums that could overflow.
    """
    rows = _packed_rows(packed)
    if weights is not None:
        if weights.shape != rows.shape[:1] or weights.dtype.is_floating_point:
            raise CodecError(f"weights are {list(weights.shape)} {weights.dtype}, not [{len(rows)}] integers")
        wide = weights.detach().to(torch.int64)
        if bool((wide.abs() > _INT32).any()) or int(wide.abs().sum()) > _INT32:
            raise CodecError(f"weights sum to {int(wide.abs().sum())}, more than {_INT32}")
        weights = wide.to(torch.int32).contiguous()
    chosen = dispatch.path()
    return reference.votes(rows, weights) if chosen == "torch" else native.votes(chosen, rows, weights)


def majority(packed: Tensor) -> Tensor:
    """Return packed bits ``[bytes]`` uint8: 1 where at least half of the rows ``[n, bytes]`` have a 1."""
    rows = _packed_rows(packed)
    chosen = dispatch.path()
    return reference.majority(rows) if chosen == "torch" else native.majority(chosen, rows)


def _packed_rows(packed: Tensor) -> Tensor:
    if packed.ndim != 2 or packed.dtype != torch.uint8 or packed.device.type != "cpu" or not len(packed):
        raise CodecError(
            f"packed is {list(packed.shape)} {packed.dtype} on {packed.device}, "
            "not [n, bytes] uint8 of at least one row on the CPU"
        )
    return packed.contiguous()
