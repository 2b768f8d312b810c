"""``y += scale * sign(delta) @ x`` for a batch with a separate one-bit delta per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native_tiles, reference
from gym_quant.kernels.lookup import MODES, LookupTables
from gym_quant.kernels.sign_matrix import SignMatrix

_NOT_FINITE = "an activation is not finite: lookup cannot round it"


def signed_matmul(
    x: Tensor, variants: Sequence[SignMatrix], index: Sequence[int] | Tensor, y: Tensor, mode: str = "exact"
) -> Tensor:
    """Add the term of each row's variant: ``y[b] += scale * sign(delta[index[b]]) @ x[b]``.

    ``exact`` adds float32 activations; its error is below 2e-6 of the term's largest value (tested against float64).
    ``lookup`` rounds sums of four activations to 8 bits, with a step for every 1,024 activations: the error is about 1%
    of the term's L2 norm for normal activations, and at most half a step per sum of four. ``lookup16`` rounds them to
    16 bits: 3e-5. Rows that share a variant read its bits once. Work is split over ``torch.get_num_threads()`` threads
    by outputs. Results do not depend on their number or the native path; those of lookup do not depend on the path at
    all. Groups that do not begin at whole bytes are computed exactly, by the reference.

    Args:
        x: ``[batch, in]`` activations; converted to float32.
        variants: The deltas, all ``[out, in]``.
        index: ``[batch]``: a row's variant, or -1 for the plain base.
        y: ``[batch, out]`` float32, contiguous: changed in place.
        mode: ``exact``, ``lookup`` or ``lookup16``.

    Returns:
        ``y``.

    Raises:
        CodecError: For shapes, indices or modes that do not fit; with lookup also for activations that are not finite
            and groups that do not begin at whole bytes.
    """
    chosen_rows = [int(i) for i in (index.tolist() if isinstance(index, Tensor) else index)]
    _check(x, variants, chosen_rows, y, mode)
    if x.is_cuda:
        from gym_quant.kernels.triton_matmul import signed_matmul_cuda

        return signed_matmul_cuda(x, variants, chosen_rows, y, mode)
    dense = x.detach().to(torch.float32).contiguous()
    chosen = dispatch.path()
    native_rows = chosen_rows
    if chosen == "torch" or not all(v.whole_bytes for v in variants):
        native_index = [
            -1 if i >= 0 and (chosen == "torch" or not variants[i].whole_bytes) else i for i in chosen_rows
        ]
        left = [i if k != i else -1 for i, k in zip(chosen_rows, native_index, strict=True)]
        _by_reference(dense, variants, left, y, mode)
        native_rows = native_index
    if any(i >= 0 for i in native_rows):
        used = sorted({i for i in native_rows if i >= 0})
        place = {v: k for k, v in enumerate(used)} | {-1: -1}
        here = np.array([place[i] for i in native_rows], dtype=np.int64)
        deltas = native_tiles.Deltas(y.shape[1], [variants[i].tiled.address for i in used])
        if mode == "exact":
            native_tiles.add_exactly(chosen, dense, here, y, native_tiles.Matrices([deltas]))
        else:
            tables = LookupTables.of(dense, mode, here, chosen)
            if not bool(tables.finite.all()):
                raise CodecError(_NOT_FINITE)
            tables.add(chosen, dense, here, y, native_tiles.Matrices([deltas]))
    return y


def _by_reference(
    x: Tensor, variants: Sequence[SignMatrix], index: Sequence[int], y: Tensor, mode: str
) -> None:
    groups = reference.rows_by_variant(index)
    if mode != "exact" and not all(bool(torch.isfinite(x[rows]).all()) for rows in groups.values()):
        raise CodecError(_NOT_FINITE)
    for variant, rows in groups.items():
        matrix = variants[variant]
        part = y[rows]
        if mode == "exact":
            reference.exact_matmul(x[rows], part, matrix.bits, matrix.scales, matrix.group_size)
        else:
            reference.lookup_matmul(x[rows], part, matrix.operands(), mode == "lookup16")
        y[rows] = part


def _check(x: Tensor, variants: Sequence[SignMatrix], index: Sequence[int], y: Tensor, mode: str) -> None:
    if mode not in MODES:
        raise CodecError(f"mode is {mode!r}, not one of {', '.join(MODES)}")
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or len(index) != len(x):
        raise CodecError(f"x is {list(x.shape)}, y {list(y.shape)} and index [{len(index)}]: batches differ")
    if y.dtype != torch.float32 or not y.is_contiguous() or y.device != x.device:
        raise CodecError(f"y is {y.dtype} on {y.device}, not contiguous float32 on {x.device}")
    for number, variant in enumerate(variants):
        if (variant.rows, variant.cols) != (y.shape[1], x.shape[1]):
            raise CodecError(
                f"variant {number} is {[variant.rows, variant.cols]}, not {[y.shape[1], x.shape[1]]}"
            )
        if mode != "exact" and not variant.whole_bytes:
            raise CodecError(
                f"variant {number}: group_size {variant.group_size} is not a multiple of 8, as lookup needs"
            )
    for row, variant_index in enumerate(index):
        if not -1 <= variant_index < len(variants):
            raise CodecError(f"index[{row}] is {variant_index}, not from -1 to {len(variants) - 1}")
