"""Matrix products with the same bits for any BLAS, number of threads and block of rows.

Every row is cut into slices of so few bits that the products of two slices add up in float64 without a rounding, in
whatever order a BLAS takes them (Ozaki et al. 2012, "Error-free transformations of matrix multiplication by using fast
routines of matrix multiplication and its applications"); the few products of slices are then added
element by element. With three slices the error is that of float64 sums, and a product costs at most six of the BLAS;
two slices, 40 bits or more below a row's largest number, are enough for what is rounded to float32, and cost three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gym_quant.codec import CodecError

_MANTISSA = 53
_OF_FLOAT32 = 2
_LARGEST_EXPONENT = 480


@dataclass(frozen=True)
class Sliced:
    """Rows of a matrix, prepared for exact products.

    Attributes:
        slices: ``[n, k]`` float64 of whole numbers, the leading bits first; those that are all zero are left out.
        powers: ``[n]`` float64, the power of two that each row was divided by.
        bits: Number of bits of a slice.
        most: Number of requested slices.
    """

    slices: tuple[Tensor, ...]
    powers: Tensor
    bits: int
    most: int

    @classmethod
    def of(cls, rows: Tensor, most: int = 3) -> Sliced:
        """Slice ``[n, k]`` finite floats into at most ``most`` parts.

        Bits too small for the last slice are lost, as are last bits of magnitudes below 2**-480.

        Raises:
            CodecError: For magnitudes above 2**480.
        """
        rest = rows.to("cpu", torch.float64).clone(memory_format=torch.contiguous_format)
        n, k = rest.shape
        peaks = rest.abs().amax(dim=1).numpy() if k else np.zeros(n)
        exponents = np.frexp(peaks)[1]
        if exponents.size and int(exponents.max()) > _LARGEST_EXPONENT:
            raise CodecError(f"magnitude {peaks.max():g} is too large to be multiplied exactly")
        exponents = np.maximum(exponents, -_LARGEST_EXPONENT)
        rest.mul_(torch.from_numpy(np.ldexp(1.0, -exponents))[:, None])
        bits = (_MANTISSA - (max(k, 1) - 1).bit_length()) // 2
        slices: list[Tensor] = []
        while not slices or (len(slices) < most and bool(rest.any())):
            rest.mul_(2.0**bits)
            slices.append(rest.round())
            rest.sub_(slices[-1])
        return cls(tuple(slices), torch.from_numpy(np.ldexp(1.0, exponents)), bits, most)

    def rows(self, start: int, stop: int) -> Sliced:
        """Select some rows."""
        return Sliced(
            tuple(s[start:stop] for s in self.slices), self.powers[start:stop], self.bits, self.most
        )


@dataclass(frozen=True)
class RightFactor:
    """``A`` ``[r, cols]`` of a low-rank ``B @ A``, prepared for float32 results with any rows of ``B``.

    Every component of ``A`` is divided by a power of two that ``B`` is multiplied by, so that components that differ by
    orders of magnitude in opposite ways lose no bits.

    Attributes:
        columns: Columns of the divided ``A``.
        powers: ``[r]`` float64.
    """

    columns: Sliced
    powers: Tensor

    @classmethod
    def of(cls, a: Tensor) -> RightFactor:
        wide = a.to("cpu", torch.float64)
        powers = torch.from_numpy(np.ldexp(1.0, np.frexp(wide.abs().amax(dim=1).numpy())[1]))
        return cls(Sliced.of((wide / powers[:, None]).T, _OF_FLOAT32), powers)

    def after(self, b: Tensor) -> Tensor:
        """``b @ a``, ``[rows, r]`` to ``[rows, cols]`` float64."""
        return products(Sliced.of(b.to("cpu", torch.float64) * self.powers, _OF_FLOAT32), self.columns)


def products(left: Sliced, right: Sliced) -> Tensor:
    """Inner products of rows, ``[n, k]`` and ``[m, k]`` to ``[n, m]`` float64: ``left @ right.T``.

    Both must be as wide, and made with the same ``most``. Symmetric to the bit for a matrix with itself; a block of
    rows has the bits that it has in the whole.
    """
    total = torch.zeros(len(left.powers), len(right.powers), dtype=torch.float64)
    for order in reversed(range(left.most)):
        total.mul_(2.0**-left.bits)
        for i in range(order // 2 + 1):
            total.add_(_pair(left, right, i, order - i))
    total.mul_(4.0**-left.bits).mul_(left.powers[:, None]).mul_(right.powers[None])
    return total.add_(0.0)  # a BLAS may give either zero, and this makes both the positive one


def gram(rows: Tensor) -> Tensor:
    """Inner products of the rows of one matrix, ``[n, k]`` to ``[n, n]`` float64."""
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
