"""The torch reference of ``order``, bit-identical, in blocks of coordinates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 22


def trimmed_mean(updates: Tensor, trim: int, out: Tensor) -> None:
    """Add the remaining values one by one, ascending, from 0.0."""
    keep = updates.shape[0] - 2 * trim
    for part in _parts(updates):
        rows = torch.sort(updates[:, part], dim=0).values
        out[part] = _added(rows[row] for row in range(trim, trim + keep)) / keep


def weighted_trimmed_mean(updates: Tensor, weights: Tensor, trim: int, out: Tensor) -> None:
    """Sort stably, so that ties, including 0.0 and -0.0, are ordered by row."""
    n = updates.shape[0]
    for part in _parts(updates):
        rows, order = torch.sort(updates[:, part], dim=0, stable=True)
        heavy = weights[order]
        middle = range(trim, n - trim)
        out[part] = _added(heavy[row] * rows[row].double() for row in middle) / _added(
            heavy[row] for row in middle
        )


def median(updates: Tensor, out: Tensor) -> None:
    """Return the middle value, or half the sum of the middle two."""
    for part in _parts(updates):
        out[part] = _middle(torch.sort(updates[:, part], dim=0).values)


def mean_around_median(updates: Tensor, keep: int, out: Tensor) -> None:
    """Move the window right while values that enter are strictly nearer than those that leave."""
    n = updates.shape[0]
    for part in _parts(updates):
        rows = torch.sort(updates[:, part], dim=0).values.double()
        middle = _middle(rows)
        start = ((rows[keep:] - middle) < (middle - rows[: n - keep])).sum(dim=0)
        positions = torch.arange(n)[:, None]
        inside = (positions >= start) & (positions < start + keep)
        out[part] = _added(row.where(mask, 0.0) for row, mask in zip(rows, inside, strict=True)) / keep


def linear_combination(updates: Tensor, weights: Tensor, out: Tensor) -> None:
    """Add row by row from 0.0, skipping rows of weight zero."""
    used = weights.nonzero()[:, 0].tolist()
    out.zero_()
    for part in _parts(updates) if used else ():
        out[part] = _added(weights[row] * updates[row, part].double() for row in used)


def products(updates: Tensor, out: Tensor) -> None:
    """Compute inner products in float64; native code is within 8e-7 of the product of the norms."""
    for part in _parts(updates):
        rows = updates[:, part].double()
        upper = torch.triu(rows @ rows.T)
        out += upper + torch.triu(upper, 1).T


def _parts(updates: Tensor) -> Iterator[slice]:
    n, d = updates.shape
    width = max(1, _BLOCK_ELEMENTS // n)
    for start in range(0, d, width):
        yield slice(start, min(d, start + width))


def _added(rows: Iterator[Tensor]) -> Tensor:
    total = next(rows).double() + 0.0
    for row in rows:
        total += row
    return total


def _middle(rows: Tensor) -> Tensor:
    n = rows.shape[0]
    low = rows[(n - 1) // 2].double() + 0.0
    return low if n % 2 else (low + rows[n // 2]) * 0.5
