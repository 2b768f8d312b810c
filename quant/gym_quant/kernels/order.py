"""Merge kernels over contributors' float updates: trimmed means, medians, combinations and inner products.

Updates are ``[n, d]`` float32 on the CPU, one row per contributor. Results do not depend on the path or the number of
threads; sums in order of value also do not depend on the order of contributors. Blocks of coordinates can be passed
one after another, each with its slice of ``out``. Rows a large power of two of bytes apart compete for the same cache
lines, so use an odd block width.

Values must be finite: with NaN or infinities the result is undefined and may depend on the path, but every function
returns. -0.0 counts as 0.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native
from gym_quant.kernels import order_reference as reference


def trimmed_mean(updates: Tensor, trim: int, out: Tensor | None = None) -> Tensor:
    """Compute coordinate-wise means without the ``trim`` smallest and largest values (Yin et al. 2018).

    The other values are added in float64 in ascending order, divided by their number, and rounded once.

    Args:
        updates: ``[n, d]`` float32.
        trim: From 0 to ``(n - 1) // 2``.
        out: ``[d]`` float32 to write into.

    Returns:
        ``[d]`` float32.

    Raises:
        CodecError: For invalid shapes, dtypes or numbers.
    """
    rows, out = _checked(updates, out)
    _check_trim(trim, len(rows))
    chosen = dispatch.path()
    if chosen == "torch":
        reference.trimmed_mean(rows, trim, out)
    else:
        native.order(chosen, native.TRIMMED, rows, None, trim, out)
    return out


def weighted_trimmed_mean(updates: Tensor, weights: Tensor, trim: int, out: Tensor | None = None) -> Tensor:
    """Compute coordinate-wise weighted means without the ``trim`` smallest and largest values.

    Equal values rank by row. The mean is ``sum w x / sum w`` over the rest, both sums in float64 in ascending order.

    Args:
        updates: ``[n, d]`` float32.
        weights: ``[n]`` float64; where the kept ones sum to zero, the result is not finite.
        trim: Number of values, regardless of their weights, from 0 to ``(n - 1) // 2``.
        out: ``[d]`` float32 to write into.

    Returns:
        ``[d]`` float32.

    Raises:
        CodecError: For invalid shapes, dtypes or numbers.
    """
    rows, out = _checked(updates, out)
    heavy = _checked_weights(weights, len(rows))
    _check_trim(trim, len(rows))
    chosen = dispatch.path()
    if chosen == "torch":
        reference.weighted_trimmed_mean(rows, heavy, trim, out)
    else:
        native.order(chosen, native.WEIGHTED, rows, heavy, trim, out)
    return out


def median(updates: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute coordinate-wise medians: the middle value, or the float64 mean of the two middle ones.

    Args:
        updates: ``[n, d]`` float32.
        out: ``[d]`` float32 to write into.

    Returns:
        ``[d]`` float32.

    Raises:
        CodecError: For unsupported shapes or dtypes.
    """
    rows, out = _checked(updates, out)
    chosen = dispatch.path()
    if chosen == "torch":
        reference.median(rows, out)
    else:
        native.order(chosen, native.MEDIAN, rows, None, 0, out)
    return out


def mean_around_median(updates: Tensor, keep: int, out: Tensor | None = None) -> Tensor:
    """Compute coordinate-wise means of the ``keep`` values nearest to the median (Xie et al. 2018; Bulyan's last step).

    In sorted order the nearest values are adjacent: a window of ``keep`` values starts at the smallest and moves right
    while the value that would enter is strictly nearer to the median than the one that would leave, so the smaller of
    two equally near values is kept. Median and distances are float64. The window is added in float64 in ascending
    order, divided by ``keep``, and rounded once.

    Args:
        updates: ``[n, d]`` float32.
        keep: From 1 to ``n``.
        out: ``[d]`` float32 to write into.

    Returns:
        ``[d]`` float32.

    Raises:
        CodecError: For invalid shapes, dtypes or numbers.
    """
    rows, out = _checked(updates, out)
    if not 1 <= keep <= len(rows):
        raise CodecError(f"keep is {keep}, not from 1 to the {len(rows)} updates")
    chosen = dispatch.path()
    if chosen == "torch":
        reference.mean_around_median(rows, keep, out)
    else:
        native.order(chosen, native.AROUND, rows, None, keep, out)
    return out


def linear_combination(updates: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``sum_i weights[i] * updates[i]``, added in float64 in row order and rounded once.

    Args:
        updates: ``[n, d]`` float32.
        weights: ``[n]`` float64; rows of weight zero are not read.
        out: ``[d]`` float32 to write into.

    Returns:
        ``[d]`` float32.

    Raises:
        CodecError: For unsupported shapes or dtypes.
    """
    rows, out = _checked(updates, out)
    heavy = _checked_weights(weights, len(rows))
    chosen = dispatch.path()
    if chosen == "torch":
        reference.linear_combination(rows, heavy, out)
    else:
        native.combine(chosen, rows, heavy, out)
    return out


def linear_combinations(updates: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``matrix @ updates``, each row bit-identical to ``linear_combination`` with that row of ``matrix``.

    Args:
        updates: ``[n, d]`` float32.
        matrix: ``[m, n]`` float64.
        out: ``[m, d]`` float32 to write into.

    Returns:
        ``[m, d]`` float32.

    Raises:
        CodecError: For unsupported shapes or dtypes.
    """
    rows = _checked_updates(updates)
    n, d = rows.shape
    if matrix.ndim != 2 or matrix.shape[1] != n or matrix.dtype != torch.float64:
        raise CodecError(f"matrix is {list(matrix.shape)} {matrix.dtype}, not [m, {n}] torch.float64")
    wide = matrix.contiguous()
    shape = (len(wide), d)
    if out is None:
        out = torch.empty(shape)
    _check_out(out, shape, torch.float32)
    chosen = dispatch.path()
    if chosen == "torch":
        for weights, target in zip(wide, out, strict=True):
            reference.linear_combination(rows, weights, target)
    else:
        native.combinations(chosen, rows, wide, out)
    return out


def products(updates: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute the inner products of all pairs of rows, within ``8e-7 * |x_i| |x_j|``.

    Native paths multiply in float32, add blocks of 256 coordinates in float32, and add the blocks in float64, in an
    order that depends only on ``n`` and ``d``, so they agree to the last bit for any number of threads. The torch
    reference computes in float64 and differs within that bound.

    Args:
        updates: ``[n, d]`` float32.
        out: ``[n, n]`` float64 to add to, to process an update block by block.

    Returns:
        ``[n, n]`` float64, symmetric if ``out`` was; ``out`` itself if given.

    Raises:
        CodecError: For unsupported shapes or dtypes.
    """
    rows = _checked_updates(updates)
    n = len(rows)
    if out is None:
        out = torch.zeros(n, n, dtype=torch.float64)
    _check_out(out, (n, n), torch.float64)
    chosen = dispatch.path()
    if chosen == "torch":
        reference.products(rows, out)
    else:
        native.products(chosen, rows, out)
    return out


def _checked(updates: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = _checked_updates(updates)
    width = rows.shape[1]
    if out is None:
        return rows, torch.empty(width)
    _check_out(out, (width,), torch.float32)
    return rows, out


def _checked_updates(updates: Tensor) -> Tensor:
    if (
        updates.ndim != 2
        or updates.dtype != torch.float32
        or updates.device.type != "cpu"
        or not len(updates)
        or not updates.is_contiguous()
    ):
        raise CodecError(
            f"updates are {list(updates.shape)} {updates.dtype} on {updates.device}"
            f"{'' if updates.is_contiguous() else ', not contiguous'}; "
            "wanted contiguous [n, d] float32 of at least one row on the CPU"
        )
    return updates.detach()


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if out.shape != shape or out.dtype != dtype or out.device.type != "cpu" or not out.is_contiguous():
        raise CodecError(
            f"out is {list(out.shape)} {out.dtype} on {out.device}, not contiguous {list(shape)} {dtype} on the CPU"
        )


def _checked_weights(weights: Tensor, n: int) -> Tensor:
    if weights.shape != (n,) or weights.dtype != torch.float64 or weights.device.type != "cpu":
        raise CodecError(
            f"weights are {list(weights.shape)} {weights.dtype} on {weights.device}, not [{n}] float64 on the CPU"
        )
    return weights.detach().contiguous()


def _check_trim(trim: int, n: int) -> None:
    if not 0 <= 2 * trim < n:
        raise CodecError(
            f"trim is {trim} at either end: of {n} updates at most {(n - 1) // 2} can be trimmed"
        )
