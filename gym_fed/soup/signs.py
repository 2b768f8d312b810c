"""Linear combinations and trimmed means of sign deltas, as integer votes on the packed bits.

Sums of integers do not depend on their order, so the result has the same bits on every machine and any number of
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gym_fed.core.lazy import kernels, torch

if TYPE_CHECKING:
    from torch import Tensor

COMBINATION_TOTAL = 1 << 30
"""Approximate sum of a combination's votes; rounding changes no vote by more than 1e-9 of it."""

TRIMMED_TOTALS = ((1 << 15) - 1, (1 << 31) - 1)
"""Sums of votes of the largest vector in a trimmed mean: 16 bits, or 32 bits at half the speed."""

TRIMMED_ERROR = 1e-3
"""Maximum rounding error of the median vector, as a share of its largest possible coordinate. The largest scale,
perhaps a malicious client's, sets the unit of all votes: if honest vectors would get too few votes, the updates are
decoded instead."""

_BLOCK_ELEMENTS = 1 << 22


def combine(bits: Sequence[Tensor], strengths: Tensor, out: Tensor) -> None:
    """Compute ``sum_i strengths[i] * sign_i``.

    Args:
        bits: n packed matrices of one shape.
        strengths: ``[n]`` float64.
        out: ``[rows, cols]`` float32, filled.
    """
    votes, unit = whole_votes(strengths[None], COMBINATION_TOTAL)
    kernels.signed_combination(bits, votes[0], unit, out.shape[1], out=out)


def trimmed_mean(bits: Sequence[Tensor], strengths: Tensor, drops: int, out: Tensor) -> bool:
    """Compute the trimmed mean, at each coordinate, of m vectors ``sum_i strengths[k, i] * sign_i``.

    Args:
        bits: n packed matrices of one shape.
        strengths: ``[m, n]`` float64.
        drops: Number of values dropped on either side.
        out: ``[rows, cols]`` float32, filled.

    Returns:
        False if integers would be too coarse; ``out`` is then unchanged.
    """
    total = _total(strengths)
    if total is None:
        return False
    votes, unit = whole_votes(strengths, total)
    kernels.signed_trimmed(bits, votes, out.shape[1], drops, unit / (len(strengths) - 2 * drops), out=out)
    return True


def majority(bits: Sequence[Tensor], weights: Tensor, magnitude: float, out: Tensor) -> None:
    """Write ``magnitude`` where at least half of the weight is plus, ``-magnitude`` otherwise.

    Args:
        bits: n packed matrices of one shape.
        weights: ``[n]`` integers.
        out: ``[rows, cols]`` float32, filled.
    """
    step = max(1, _BLOCK_ELEMENTS // out.shape[1])
    for start in range(0, len(out), step):
        stop = min(len(out), start + step)
        votes = kernels.signed_votes([matrix[start:stop] for matrix in bits], weights, out.shape[1])
        out[start:stop] = torch.where(votes < 0, -magnitude, magnitude)


def _total(strengths: Tensor) -> int | None:
    """Return the smallest total that keeps rounding within ``TRIMMED_ERROR``; None if there is none."""
    sizes = strengths.abs().sum(dim=1).sort().values
    sizes = sizes[sizes > 0.0]
    if not len(sizes):
        return TRIMMED_TOTALS[0]
    terms = int((strengths != 0.0).sum(dim=1).max())
    spread = terms * float(sizes[-1] / sizes[(len(sizes) - 1) // 2])
    for total in TRIMMED_TOTALS:
        room = total - strengths.shape[1]
        if room > 0 and spread / (2 * room) <= TRIMMED_ERROR:
            return total
    return None


def whole_votes(strengths: Tensor, total: int) -> tuple[Tensor, float]:
    """Round strengths to proportional integers.

    Args:
        strengths: ``[m, n]`` float64.
        total: Upper bound on the sum of magnitudes of a row.

    Returns:
        ``[m, n]`` int32 votes and the unit; ``unit * votes`` approximates ``strengths``.
    """
    peak = float(strengths.abs().sum(dim=1).max())
    if peak == 0.0:
        return torch.zeros(strengths.shape, dtype=torch.int32), 0.0
    unit = peak / (total - strengths.shape[1])  # each of n roundings adds at most a half
    return (strengths / unit).round().to(torch.int32), unit
