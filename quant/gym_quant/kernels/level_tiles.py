"""Represent levels as planes of signs, so that ternary, 2-bit and 4-bit deltas use the lookup tables of sign deltas.

Evenly spaced levels are sums of signs: code ``c`` of ``2**n`` is ``(sum of 2**k * sign of its bit k + 2**n - 1) / 2``.
For another number of levels (ternary), plane ``k`` tells whether the code is above ``k``, and all planes count equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gym_quant.bitstream import Bytes
from gym_quant.errors import CodecError
from gym_quant.kernels import reference
from gym_quant.kernels.resident import SignBatch
from gym_quant.kernels.tiles import MAX_PLANES, Tiled
from gym_quant.resident import Resident


@dataclass(frozen=True)
class LevelPlanes:
    """The mapping of codes to planes of signs: ``value = factor * scale * (sum - zero) + offset``.

    Attributes:
        levels: Number of codes.
        shifts: Shifts of the planes.
        zero: See ``Tiled``.
        factor: 0.5 or 1.
    """

    levels: int
    shifts: tuple[int, ...]
    zero: int
    factor: float

    @classmethod
    def of(cls, coefficients: Sequence[Sequence[float]]) -> LevelPlanes | None:
        """Build the planes from every code's scale factor and offset factor; None if planes cannot express them."""
        first, *others = coefficients
        levels, step = len(first), first[1] - first[0]
        power = levels & (levels - 1) == 0
        shifts = tuple(range(levels.bit_length() - 1)) if power else (0,) * (levels - 1)
        even = all(value == first[0] + step * code for code, value in enumerate(first))
        plain = all(value == 1.0 for other in others for value in other)
        if not even or not plain or len(others) > 1 or len(shifts) > MAX_PLANES or step not in (1.0, 2.0):
            return None
        zero = -((levels - 1) + 2 * first[0] / step)
        return cls(levels, shifts, int(zero), step / 2) if zero == int(zero) else None

    def bits(self, codes: Bytes) -> Bytes:
        """Convert ``[rows, cols]`` codes to ``[planes, rows, ceil(cols / 8)]``."""
        power = self.levels & (self.levels - 1) == 0
        planes = [codes >> k & 1 if power else codes > k for k in range(len(self.shifts))]
        return np.stack([np.packbits(plane, axis=1, bitorder="little") for plane in planes])

    def tiled(
        self, bits: Tensor, scales: Tensor, offsets: Tensor | None, cols: int, group: int | None
    ) -> Tiled:
        """Copy into tiles; ``scales`` and ``offsets`` as in the payload."""
        shared = scales.to(torch.float32) * self.factor
        return Tiled.of(bits, shared, cols, group, shifts=self.shifts, zero=self.zero, offsets=offsets)


class ResidentTiles(Resident):
    """A delta of evenly spaced levels in tiles, multiplied by lookup only.

    Args:
        tiled: The planes with their scales.
        largest: A bound on the magnitude of the values.
    """

    form = "levels"
    matrix = None

    def __init__(self, tiled: Tiled, largest: float) -> None:
        self.rows, self.cols = tiled.rows, tiled.cols
        self.tiled, self._largest = tiled, largest

    @property
    def nbytes(self) -> int:
        return self.tiled.nbytes

    def decode_rows(self, rows: Tensor) -> Tensor:
        return self.tiled.decode_rows(rows)

    def decode_block(self, start: int, stop: int) -> Tensor:
        return self.tiled.decode_block(start, stop)

    def largest(self) -> float:
        return self._largest

    def check_kernel(self, kernel: str) -> None:
        """Refuse exact products, which support only one plane.

        Raises:
            CodecError: For ``exact``.
        """
        if kernel == "exact":
            raise CodecError("levels in sign planes support only lookup products")

    def operands(self) -> reference.Operands:
        """Return the operands of the lookup reference."""
        return self.tiled.operands()

    @classmethod
    def batch(cls, variants: Sequence[ResidentTiles], kernel: str) -> SignBatch:
        return SignBatch(variants, kernel)
