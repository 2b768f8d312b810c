"""Compute matrix products that are bit-identical for any BLAS, number of threads and block of rows.

Every row is split into slices of so few bits that products of two slices are summed in float64 without rounding, in any
order of summation (Ozaki et al. 2012, "Error-free transformations of matrix multiplication by using fast routines of
matrix multiplication and its applications"); the few slice products are then added element by element. Three slices
give the error of float64 sums and cost at most six BLAS products; two slices, which reach at least 40 bits below a
row's largest number, are enough for results rounded to float32 and cost three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gym_quant.codec import CodecError

_MANTISSA = 53
_FLOAT32_SLICES = 2
_MAX_EXPONENT = 480


@dataclass(frozen=True)
class Sliced:
    """A matrix whose rows are prepared for exact products.

    Attributes:
        slices: Whole numbers, each ``[n, k]`` float64, leading bits first; slices that are all zero are omitted.
        powers: ``[n]`` float64, the power of two by which each row was divided.
        bits: Bits per slice.
        most: Maximum number of slices.
    """

    slices: tuple[Tensor, ...]
    powers: Tensor
    bits: int
    most: int

    @classmethod
    def of(cls, rows: Tensor, most: int = 3) -> Sliced:
        """Slice ``[n, k]`` finite floats into at most ``most`` parts.

        Bits below the last slice are lost, as are the last bits of magnitudes below 2**-480.

        Raises:
            CodecError: For magnitudes above 2**480.
        """
        rest = rows.to("cpu", torch.float64).clone(memory_format=torch.contiguous_format)
        n, k = rest.shape
        peaks = rest.abs().amax(dim=1).numpy() if k else np.zeros(n)
        exponents = np.frexp(peaks)[1]
        if exponents.size and int(exponents.max()) > _MAX_EXPONENT:
            raise CodecError(f"magnitude {peaks.max():g} is too large to be multiplied exactly")
        exponents = np.maximum(exponents, -_MAX_EXPONENT)
        rest.mul_(torch.from_numpy(np.ldexp(1.0, -exponents))[:, None])
        bits = (_MANTISSA - (max(k, 1) - 1).bit_length()) // 2
        slices: list[Tensor] = []
        while not slices or (len(slices) < most and bool(rest.any())):
            rest.mul_(2.0**bits)
            slices.append(rest.round())
            rest.sub_(slices[-1])
        return cls(tuple(slices), torch.from_numpy(np.ldexp(1.0, exponents)), bits, most)

    def rows(self, start: int, stop: int) -> Sliced:
        """Select rows ``start`` to ``stop``."""
        return Sliced(
            tuple(s[start:stop] for s in self.slices), self.powers[start:stop], self.bits, self.most
        )


@dataclass(frozen=True)
class RightFactor:
    """``A`` ``[r, cols]`` of a low-rank ``B @ A``, prepared for float32 products with any rows of ``B``.

    Every component of ``A`` is divided by a power of two, and that of ``B`` multiplied by it, so that no bits are lost
    if their magnitudes differ by orders in opposite directions.

    Attributes:
        columns: The columns of the divided ``A``.
        powers: The powers of two, ``[r]`` float64.
    """

    columns: Sliced
    powers: Tensor

    @classmethod
    def of(cls, a: Tensor) -> RightFactor:
        wide = a.to("cpu", torch.float64)
        powers = torch.from_numpy(np.ldexp(1.0, np.frexp(wide.abs().amax(dim=1).numpy())[1]))
        return cls(Sliced.of((wide / powers[:, None]).T, _FLOAT32_SLICES), powers)

    def after(self, b: Tensor) -> Tensor:
        """Return ``b @ a`` ``[rows, cols]`` float64 for ``b`` ``[rows, r]``."""
        return products(Sliced.of(b.to("cpu", torch.float64) * self.powers, _FLOAT32_SLICES), self.columns)


def products(left: Sliced, right: Sliced) -> Tensor:
    """Return the inner products of rows, ``left @ right.T``: ``[n, k]`` and ``[m, k]`` to ``[n, m]`` float64.

    Both must be equally wide and sliced with the same ``most``. The product of a matrix with itself is exactly
    symmetric; a block of rows has the same bits as in the whole product.
    """
    total = torch.zeros(len(left.powers), len(right.powers), dtype=torch.float64)
    for order in reversed(range(left.most)):
        total.mul_(2.0**-left.bits)
        for i in range(order // 2 + 1):
            total.add_(_pair(left, right, i, order - i))
    total.mul_(4.0**-left.bits).mul_(left.powers[:, None]).mul_(right.powers[None])
    return total.add_(0.0)  # a BLAS may return either zero; this makes it the positive one


def gram(rows: Tensor) -> Tensor:
    """Return the inner products of one matrix's rows, ``[n, k]`` to ``[n, n]`` float64."""
    sliced = Sliced.of(rows)
    return products(sliced, sliced)


def _pair(left: Sliced, right: Sliced, i: int, j: int) -> Tensor:
    """Multiply slices i and j of the two matrices, and j and i."""
    product = _product(left, right, i, j)
    if i == j:
        return product
    return product + (product.T if left is right else _product(left, right, j, i))


def _product(left: Sliced, right: Sliced, i: int, j: int) -> Tensor:
    if i >= len(left.slices) or j >= len(right.slices):
        return torch.zeros(len(left.powers), len(right.powers), dtype=torch.float64)
    return left.slices[i] @ right.slices[j].T
