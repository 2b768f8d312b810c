"""Building blocks of merge methods: sums of deltas, sign consensus, inner products, and sparsification.

All sums run over the models in order, element by element in float64 and on one thread, so that the result does not
depend on the number of threads; only ``BLOCK`` elements are in float64 at a time. Random drops are determined by a seed
and are the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.lazy import torch
from gym_fed.soup.gram import GramMatrix

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 18


def combination(deltas: Sequence[Tensor] | Tensor, coefficients: Tensor) -> Tensor:
    """Compute ``sum_i coefficients[i] * deltas[i]``.

    Args:
        deltas: n tensors of one shape, float32.
        coefficients: ``[n]`` float64.

    Returns:
        The sum in the deltas' shape, float32.
    """
    result = torch.empty(deltas[0].shape)
    for into, values in blocks(result, deltas):
        into[:] = sum(value * factor for value, factor in zip(values, coefficients.tolist(), strict=True))
    return result


def sign_consensus(deltas: Sequence[Tensor] | Tensor, weights: Tensor, votes: Tensor) -> Tensor:
    """Elect a sign for each element and average the deltas that agree with it (Yadav et al. 2023, sec. 3).

    The elected sign is that of ``sum_i votes[i] * deltas[i]``. Zeros have no sign and do not count in the mean; if the
    votes cancel out exactly, sign and result are zero, as in the paper's formula (mergekit elects plus).

    Args:
        deltas: n tensors of one shape, float32.
        weights: ``[n]`` float64 weights of the mean; not negative.
        votes: ``[n]`` float64 weights of the election.

    Returns:
        The mean in the deltas' shape, float32.
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
    """Compute ``[n, n]`` float64 inner products of ``[n, rows, cols]`` float32."""
    count = len(deltas)
    flat, ones = deltas.reshape(count, -1), torch.ones(count)
    total = torch.zeros(count, count, dtype=torch.float64)
    for start in range(0, flat.shape[1], BLOCK):
        total += GramMatrix.of(flat[:, start : start + BLOCK], ones).products
    return total


def blocks(
    result: Tensor, deltas: Sequence[Tensor] | Tensor
) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """Yield writable views of ``result``, each with the same elements of every delta in float64."""
    into, sources = result.reshape(-1).numpy(), [delta.reshape(-1).numpy() for delta in deltas]
    for start in range(0, into.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield into[part], [source[part].astype(np.float64) for source in sources]


def whole_share(share: float, size: int) -> int:
    """Return the number of elements in a share of ``size``; values within rounding error of an integer are rounded."""
    return math.floor(round(share * size, 6))


def largest(delta: Tensor, count: int) -> Tensor:
    """Return a mask of the ``count`` elements with the largest magnitude; ties go to the lower index.

    Args:
        delta: Any shape, finite.
        count: Number of elements, from 0 to ``delta.numel()``.

    Returns:
        A bool tensor in the delta's shape.
    """
    magnitudes = delta.abs().reshape(-1).numpy()
    if count <= 0:
        return torch.zeros(delta.shape, dtype=torch.bool)
    threshold = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    mask = magnitudes > threshold
    equal = np.flatnonzero(magnitudes == threshold)
    mask[equal[: count - int(mask.sum())]] = True
    return torch.from_numpy(mask).reshape(delta.shape)


def trimmed(delta: Tensor, density: float) -> Tensor:
    """Zero the smallest ``1 - density`` of a delta's elements."""
    dropped = whole_share(1.0 - density, delta.numel())
    return torch.where(largest(delta, delta.numel() - dropped), delta, 0.0)


def draws(seed: int, name: str, index: int, shape: torch.Size) -> Tensor:
    """Return uniform float32 numbers in [0, 1) that depend only on the seed, tensor name and model index."""
    text = f"{seed}/{index}/{name}"
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(shape, generator=generator)


def dropped_at_random(delta: Tensor, density: float, uniform: Tensor) -> Tensor:
    """Keep each element with probability ``density`` and divide it by ``density`` (DARE: Yu et al. 2024, eq. 1).

    Its expectation is the delta.
    """
    return torch.where(uniform < density, delta / density, 0.0)
