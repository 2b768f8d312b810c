"""Building blocks of merge methods: sums of deltas, means over those that agree in sign, inner products.

All sums run over the models in their order, element by element in float64 and on one thread, so that no bit depends on
the number of threads; a block of ``BLOCK`` elements is held in float64 at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy_torch import torch
from gym_fed.soup.linalg.gram import GramMatrix

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 18


def combination(deltas: Sequence[Tensor] | Tensor, coefficients: Tensor) -> Tensor:
    """``sum_i coefficients[i] * deltas[i]``.

    Args:
        deltas: n tensors of one shape, float32.
        coefficients: ``[n]`` float64.

    Returns:
        Of the deltas' shape, float32.
    """
    result = torch.empty(deltas[0].shape)
    for into, values in blocks(result, deltas):
        into[:] = sum(value * factor for value, factor in zip(values, coefficients.tolist(), strict=True))
    return result


def sign_consensus(deltas: Sequence[Tensor] | Tensor, weights: Tensor, votes: Tensor) -> Tensor:
    """Elect a sign for every element, then take the mean of the deltas that have it (Yadav et al. 2023, sec. 3).

    Elected is the sign of ``sum_i votes[i] * deltas[i]``. Zeros have no sign and do not count in the mean; where the
    votes cancel out exactly, sign and result are zero, as in the paper's formula (mergekit elects plus).

    Args:
        deltas: n tensors of one shape, float32.
        weights: ``[n]`` float64, of the mean; not negative.
        votes: ``[n]`` float64, of the election.

    Returns:
        Of the deltas' shape, float32.
    """
    result = torch.empty(deltas[0].shape)
    for into, values in blocks(result, deltas):
        elected = np.sign(sum(value * vote for value, vote in zip(values, votes.tolist(), strict=True)))
        total, mass = np.zeros(len(into)), np.zeros(len(into))
        for value, weight in zip(values, weights.tolist(), strict=True):
            agrees = (np.sign(value) == elected) & (elected != 0)
            total += np.where(agrees, value * weight, 0.0)
            mass += np.where(agrees, weight, 0.0)
        into[:] = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
    return result


def inner_products(deltas: Tensor) -> Tensor:
    """``[n, rows, cols]`` float32 to ``[n, n]`` float64."""
    count = len(deltas)
    flat, ones = deltas.reshape(count, -1), torch.ones(count)
    total = torch.zeros(count, count, dtype=torch.float64)
    for start in range(0, flat.shape[1], BLOCK):
        total += GramMatrix.of(flat[:, start : start + BLOCK], ones).products
    return total


def blocks(
    result: Tensor, deltas: Sequence[Tensor] | Tensor
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Views of ``result``, to be written to, each with the same elements of every delta in float64."""
    into, sources = result.reshape(-1).numpy(), [delta.reshape(-1).numpy() for delta in deltas]
    for start in range(0, into.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield into[part], [source[part].astype(np.float64) for source in sources]
