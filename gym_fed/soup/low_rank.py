"""Low-rank updates of one weight: merge and recompress LoRA factors without forming their products.

An update is ``scaling * B @ A`` with ``A`` ``[r, cols]`` and ``B`` ``[rows, r]``; ranks may differ between
contributors. Averaging A and B separately is not averaging the updates. Inner products of updates come from Gram
matrices of the factors, and any linear combination of updates is the product of their stacked factors (Wang et al.
2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations"): every rule that
weights whole updates is exact for any ranks. The result does not depend on the number of threads (``gym_quant.exact``).

The rank of a soup of n adapters is up to the sum of theirs. Its singular components come from a QR of both factors and
the SVD of a small core, never from the product (``gym_quant.factors.components_of_product``). The first r components
are the best approximation of rank r (Eckart and Young 1936); the others are written as factors too, so adapter plus
residual is the soup itself. Singhal et al. 2025, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning
of Large Language Models", keeps the residual of averaged factors; the residual of the best adapter is smaller.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from gym_quant.codec import Payload
from gym_quant.exact import RightFactor, Sliced
from gym_quant.exact import products as exact_products
from gym_quant.factors import components_of_product
from gym_quant.registry import get_codec
from numpy.typing import NDArray
from torch import Tensor

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.manifest import TensorRecord

_BLOCK_RANKS = 512
"""Number of components per block; the Gram matrices of two blocks are in memory at a time."""


@dataclass(frozen=True)
class LowRank:
    """A matrix given by its factors ``b @ a``.

    Attributes:
        a: ``[r, cols]`` float64.
        b: ``[rows, r]`` float64, including the scaling. ``r`` may be 0 (zeros) and may exceed both dimensions.
    """

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, payload: Payload, record: TensorRecord) -> LowRank:
        """Decode the factors from a checked payload, in any stored form.

        Raises:
            TypeError: For a codec without factors (see ``Codec.rank``).
        """
        codec = get_codec(record.codec)
        factors = codec.factors(payload, record.shape, record.params)
        if factors is None:
            raise TypeError(f"codec {record.codec!r} has no factors")
        a, b = (factor.to(torch.float64) for factor in factors)
        scaling = codec.scaling(record.params)
        if not bool(a.any()) or not bool(
            b.any()
        ):  # with a zero factor, the codec allows scalings that overflow the other factor
            scaling = 0.0
        return cls(a, b * scaling)

    @property
    def rank(self) -> int:
        """The number of components, which may be linearly dependent."""
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product."""
        return self.b.shape[0], self.a.shape[1]

    @functools.cached_property
    def _right(self) -> RightFactor:
        return RightFactor.of(self.a)


def products(factors: Sequence[LowRank | None]) -> Tensor:
    """Compute the inner products of low-rank updates: ``<B1 A1, B2 A2> = sum((B1' B2) * (A1 A2'))``.

    Args:
        factors: n updates; None for one without the tensor, which counts as zero.

    Returns:
        ``[n, n]`` float64, symmetric, with a non-negative diagonal. The Gram matrices are computed for two blocks of
        updates at a time, so memory does not grow with the square of n.
    """
    gram = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    blocks = _blocks(factors)
    present = [factor for block in blocks for _, factor in block]
    if not present:
        return gram
    common_shape(present)
    for at, block in enumerate(blocks):
        left = _Grams(block)
        for other in blocks[at:]:
            right = left if other is block else _Grams(other)
            sums = left.products(right)
            gram[np.ix_(left.places, right.places)] = sums
            gram[np.ix_(right.places, left.places)] = sums.T
    gram.diagonal().clamp_(min=0.0)  # rounding can make squares negative
    return gram


class _Grams:
    """Factors of some updates, prepared for inner products; results have the same bits for any block size."""

    def __init__(self, block: Sequence[tuple[int, LowRank]]) -> None:
        self.places = [place for place, _ in block]
        self._starts = np.cumsum([0, *(factor.rank for _, factor in block[:-1])])
        self._a = Sliced.of(torch.cat([factor.a for _, factor in block]))
        self._b = Sliced.of(torch.cat([factor.b for _, factor in block], dim=1).T)

    def products(self, other: _Grams) -> Tensor:
        core = (exact_products(self._b, other._b) * exact_products(self._a, other._a)).numpy()
        sums = _sums(core, self._starts, other._starts)
        return torch.from_numpy(
            (sums + _sums(np.ascontiguousarray(core.T), other._starts, self._starts).T) / 2
        )


def _sums(core: NDArray[np.float64], rows: NDArray[np.int64], cols: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum the blocks of a matrix that start at given rows and columns, rows first."""
    sums: NDArray[np.float64] = np.add.reduceat(np.add.reduceat(core, rows, axis=0), cols, axis=1)
    return sums


def _blocks(factors: Sequence[LowRank | None]) -> list[list[tuple[int, LowRank]]]:
    """Yield the updates that are present, with their indices, in blocks of about ``_BLOCK_RANKS`` components."""
    blocks: list[list[tuple[int, LowRank]]] = []
    held = _BLOCK_RANKS
    for place, factor in enumerate(factors):
        if factor is None or not factor.rank:
            continue
        if held + factor.rank > _BLOCK_RANKS:
            blocks.append([])
            held = 0
        blocks[-1].append((place, factor))
        held += factor.rank
    return blocks


def combine(factors: Sequence[LowRank | None], coefficients: Tensor) -> LowRank:
    """Combine factors so that their product is ``sum_i coefficients[i] * B_i @ A_i``.

    The factors are stacked; if all updates share one A, the result is that A with the combined B.

    Args:
        factors: n updates; None for zero, but not for all.
        coefficients: ``[n]`` float64; updates whose coefficient is zero add nothing to the rank.

    Raises:
        GymError: ``USAGE`` if shapes differ, or if all updates are None.
    """
    if coefficients.shape != (len(factors),):
        raise GymError(
            ErrorCode.USAGE, f"{counted(len(factors), 'update')} but coefficients {list(coefficients.shape)}"
        )
    rows, cols = common_shape([factor for factor in factors if factor is not None])
    parts = [
        LowRank(factor.a, factor.b * coefficient)
        for factor, coefficient in zip(factors, coefficients.tolist(), strict=True)
        if factor is not None and coefficient != 0.0
    ]
    if not parts:
        return LowRank(torch.zeros(0, cols, dtype=torch.float64), torch.zeros(rows, 0, dtype=torch.float64))
    shared = frozen_a(parts)
    if shared is not None:
        return LowRank(shared, functools.reduce(torch.add, [part.b for part in parts]))
    return LowRank(torch.cat([part.a for part in parts]), torch.cat([part.b for part in parts], dim=1))


def rows_of(low_rank: LowRank, start: int, stop: int) -> Tensor:
    """Return rows ``start`` to ``stop`` of the product, ``[stop - start, cols]`` float32; same bits for any block."""
    return low_rank._right.after(low_rank.b[start:stop]).to(torch.float32)


def frozen_a(factors: Sequence[LowRank | None]) -> Tensor | None:
    """Return the A ``[r, cols]`` shared bit for bit by all updates; None if two differ or there are no updates.

    With a shared A, a coordinate-wise rule on the B (including the scaling) gives a soup of rank r: the merged B times
    A (Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning").
    """
    present = [factor.a for factor in factors if factor is not None]
    if not present or not all(torch.equal(present[0], a) for a in present[1:]):
        return None
    return present[0]


def powers_of_two(rows: Tensor) -> Tensor:
    """Return the largest power of two not above each row's largest magnitude, ``[n]`` float64; 1 for zero rows."""
    peaks = rows.abs().amax(dim=1).numpy()
    return torch.from_numpy(np.where(peaks > 0.0, np.ldexp(1.0, np.frexp(peaks)[1] - 1), 1.0))


def common_shape(factors: Sequence[LowRank]) -> tuple[int, int]:
    """Return the common number of rows and columns.

    Raises:
        GymError: ``USAGE`` if two differ, or if there are no factors.
    """
    shapes = sorted({factor.shape for factor in factors})
    if len(shapes) != 1:
        raise GymError(ErrorCode.USAGE, f"LoRA updates of one weight have different shapes: {shapes}")
    return shapes[0]


_LAPACK = threading.Lock()


@dataclass(frozen=True)
class Refactored:
    """A low-rank matrix as a sum of two parts.

    Attributes:
        kept: Best approximation of the requested rank, or of the matrix's own rank if that is lower.
        residual: The remaining components; rank 0 if there are none.
        relative_residual: Frobenius norm of the residual relative to that of the matrix; 0.0 for a matrix of zeros.
        singular_values: ``[k]`` float64 singular values of the matrix, descending, without those that are rounding
            errors.
    """

    kept: LowRank
    residual: LowRank
    relative_residual: float
    singular_values: Tensor


def refactor(low_rank: LowRank, rank: int) -> Refactored:
    """Split a low-rank matrix into its ``rank`` largest singular components and a remainder, in balanced factors.

    Components below ``eps * max(rows, cols)`` times the first are rounding errors and are dropped. LAPACK runs on one
    thread, so that the bits do not depend on the number of threads.

    Raises:
        GymError: ``USAGE`` for a rank below 1.
    """
    if rank < 1:
        raise GymError(ErrorCode.USAGE, f"an adapter of rank {rank} is empty", "use a rank of at least 1")
    if not low_rank.rank:
        return Refactored(low_rank, low_rank, 0.0, torch.zeros(0, dtype=torch.float64))
    with one_thread():
        components = components_of_product(low_rank.b, low_rank.a)
    floor = float(components.values[0]) * torch.finfo(torch.float64).eps * max(low_rank.shape)
    components = components.first(int((components.values > floor).sum()))
    squares = components.values.square().tolist()
    total = math.fsum(squares)
    return Refactored(
        LowRank(components.right[:rank], components.left[:, :rank]),
        LowRank(components.right[rank:], components.left[:, rank:]),
        math.sqrt(math.fsum(squares[rank:]) / total) if total else 0.0,
        components.values,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run LAPACK on one thread in the block, for reproducible bits. Not reentrant: the thread count is per process."""
    with _LAPACK:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
