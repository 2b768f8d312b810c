"""The torch reference of ``mixing``: integer arithmetic on signs, which are unpacked in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PIECE = 1 << 22  # number of signs or mixed values that are unpacked at once

Array = np.ndarray[Any, Any]


def sign_products(bits: Sequence[Tensor], scales: Sequence[Tensor], cols: int, group: int | None) -> Tensor:
    """Compute ``[n, n]`` float64 from every group's distances, summed by ascending row and group."""
    n, rows = len(bits), bits[0].shape[0]
    starts = np.arange(0, cols, cols if group is None else group)
    lengths = np.diff(np.append(starts, cols))
    factors = np.stack([matrix.numpy().astype(np.float64) for matrix in scales])
    totals = np.zeros((n, n))
    for part in _row_pieces(rows, n * cols):
        signs = np.stack(
            [np.unpackbits(matrix[part].numpy(), axis=1, count=cols, bitorder="little") for matrix in bits]
        )
        for i in range(n):
            differ = np.add.reduceat(signs ^ signs[i], starts, axis=2, dtype=np.int64)  # [n, rows, groups]
            if group is None:
                totals[i] += (lengths - 2 * differ).sum(axis=(1, 2))
                continue
            terms = (factors[i, part] * factors[:, part]) * (lengths - 2 * differ)
            # unlike sum, cumsum adds in order
            totals[i] = np.cumsum(np.hstack([totals[i][:, None], terms.reshape(n, -1)]), axis=1)[:, -1]
    if group is None:  # sums of integers up to here, so exact
        totals *= factors[:, 0][:, None] * factors[:, 0][None, :]
    return torch.from_numpy(totals)


def signed_votes(path: str, bits: Sequence[Tensor], weights: Tensor, out: Tensor, unit: float) -> None:
    """Write the sums into ``out`` ``[rows, cols]`` int32 or, times ``unit``, float32."""
    for part, signs in _pieces(bits, out.shape[1]):
        sums = np.zeros(signs.shape[1:], dtype=np.int64)
        for weight, sign in zip(weights.tolist(), signs, strict=True):
            sums += weight * sign.astype(np.int64)
        _write(sums, unit, out[part])


def signed_trimmed(
    path: str, bits: Sequence[Tensor], mixing: Tensor, trim: int, unit: float, out: Tensor
) -> None:
    """Write ``unit`` times the trimmed sums of the mixed rows into ``out`` ``[rows, cols]`` float32."""
    m = len(mixing)
    for part, signs in _pieces(bits, out.shape[1], m):
        flat = signs.reshape(len(bits), -1)
        mixed = np.zeros((m, flat.shape[1]), dtype=np.int64)
        for k, row in enumerate(mixing.tolist()):
            for weight, sign in zip(row, flat, strict=True):
                if weight:
                    mixed[k] += weight * sign.astype(np.int64)
        mixed.sort(axis=0)
        _write(mixed[trim : m - trim].sum(axis=0).reshape(signs.shape[1:]), unit, out[part])


def _write(sums: Array, unit: float, out: Tensor) -> None:
    if out.dtype == torch.int32:
        out.copy_(torch.from_numpy(sums))
    else:
        with np.errstate(over="ignore"):  # a value beyond float32 is infinite, as in native code
            out.copy_(torch.from_numpy((sums.astype(np.float64) * unit).astype(np.float32)))


def _pieces(bits: Sequence[Tensor], cols: int, more: int = 0) -> Iterator[tuple[slice, Array]]:
    """Yield rows with their signs ``[n, rows, cols]`` int8 of +1 and -1."""
    for part in _row_pieces(bits[0].shape[0], cols * (len(bits) + more)):
        yield (
            part,
            np.stack(
                [
                    np.unpackbits(matrix[part].numpy(), axis=1, count=cols, bitorder="little").astype(np.int8)
                    * 2
                    - 1
                    for matrix in bits
                ]
            ),
        )


def _row_pieces(rows: int, a_row: int) -> Iterator[slice]:
    piece = max(1, _PIECE // max(1, a_row))
    for start in range(0, rows, piece):
        yield slice(start, start + piece)
