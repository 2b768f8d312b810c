"""Linear combinations and trimmed means of sign deltas as votes of whole numbers, on the packed bits.

Sums of whole numbers do not depend on their order, so the result is the same to the last bit on every machine and
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gym_quant.kernels import signed_combination, signed_trimmed, signed_votes
from torch import Tensor

COMBINATION_TOTAL = 1 << 30
"""A combination's votes add up to about this, so rounding changes none by more than 1e-9 of the whole."""

TRIMMED_TOTAL = (1 << 15) - 1
"""So do those of every vector that is trimmed coordinate by coordinate: the largest with which 16 bits suffice."""

_BLOCK_ELEMENTS = 1 << 22


def combine(bits: Sequence[Tensor], strengths: Tensor, out: Tensor) -> None:
    """``sum_i strengths[i] * sign_i``.

    Args:
        bits: n packed matrices of one shape.
        strengths: ``[n]`` float64.
        out: ``[rows, cols]`` float32, filled.
    """
    votes, unit = whole_votes(strengths[None], COMBINATION_TOTAL)
    signed_combination(bits, votes[0], unit, out.shape[1], out=out)


def trimmed_mean(bits: Sequence[Tensor], strengths: Tensor, drops: int, out: Tensor) -> None:
    """Of m vectors ``sum_i strengths[k, i] * sign_i`` at each coordinate the mean of the middle ones.

    Args:
        bits: n packed matrices of one shape.
        strengths: ``[m, n]`` float64.
        drops: Values dropped on either side.
        out: ``[rows, cols]`` float32, filled.
    """
    votes, unit = whole_votes(strengths, TRIMMED_TOTAL)
    signed_trimmed(bits, votes, out.shape[1], drops, unit / (len(strengths) - 2 * drops), out=out)


def majority(bits: Sequence[Tensor], weights: Tensor, magnitude: float, out: Tensor) -> None:
    """``magnitude`` where at least half of the weight has a plus, ``-magnitude`` elsewhere.

    Args:
        bits: n packed matrices of one shape.
        weights: ``[n]`` whole numbers.
        out: ``[rows, cols]`` float32, filled.
    """
    step = max(1, _BLOCK_ELEMENTS // out.shape[1])
    for start in range(0, len(out), step):
        stop = min(len(out), start + step)
        votes = signed_votes([matrix[start:stop] for matrix in bits], weights, out.shape[1])
        out[start:stop] = torch.where(votes < 0, -magnitude, magnitude)


def whole_votes(strengths: Tensor, total: int) -> tuple[Tensor, float]:
    """Whole numbers proportional to strengths.

    Args:
        strengths: ``[m, n]`` float64.
        total: What the magnitudes of a row may add up to.

    Returns:
        ``[m, n]`` int32 votes and the unit, so that ``unit * votes`` is ``strengths`` rounded.
    """
    peak = float(strengths.abs().sum(dim=1).max())
    if peak == 0.0:
        return torch.zeros(strengths.shape, dtype=torch.int32), 0.0
    unit = peak / (total - strengths.shape[1])  # each of n roundings adds at most a half
    return (strengths / unit).round().to(torch.int32), unit
