"""A layer of a variant for the kernels: one bit per weight, with scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import reference
from gym_quant.kernels.tiles import Tiled


@dataclass(frozen=True, eq=False)
class SignMatrix:
    """A layer of a variant: the signs and scales of a delta ``[out, in]``.

    Native code reads the bits in tiles of 64 outputs. This copy is made on first use and kept, which doubles the
    memory.

    Args:
        bits: ``[out, ceil(in / 8)]`` uint8, from ``encode_signs``.
        scales: ``[1]``, ``[out, 1]`` or ``[out, ceil(in / group_size)]`` float32.
        cols: ``in``.
        group_size: Inputs that share a scale; ``None`` for one scale per tensor or row.

    Raises:
        CodecError: For shapes and dtypes that do not fit each other.
    """

    bits: Tensor
    scales: Tensor
    cols: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if (
            self.bits.ndim != 2
            or self.bits.dtype != torch.uint8
            or self.bits.shape[1] != (self.cols + 7) // 8
        ):
            raise CodecError(
                f"bits are {list(self.bits.shape)} {self.bits.dtype}, which does not match {self.cols} columns"
            )
        rows = self.bits.shape[0]
        if self.group_size is not None and self.group_size < 1:
            raise CodecError(f"group_size is {self.group_size}, not a positive integer")
        groups = 1 if self.group_size is None else -(-self.cols // self.group_size)
        fitting = [[rows, groups]] if self.group_size is not None else [[1], [rows, 1]]
        if list(self.scales.shape) not in fitting or self.scales.dtype != torch.float32:
            shapes = " or ".join(map(str, fitting))
            raise CodecError(
                f"scales are {list(self.scales.shape)} {self.scales.dtype}, not {shapes} float32"
            )

    @property
    def rows(self) -> int:
        """The output dimension."""
        return self.bits.shape[0]

    @property
    def whole_bytes(self) -> bool:
        """True if every group begins at a whole byte, as native code and lookup require."""
        return self.group_size is None or self.group_size % 8 == 0 or self.group_size >= self.cols

    @cached_property
    def tiled(self) -> Tiled:
        """The result of ``tiles``, cached with the matrix."""
        return self.tiles()

    def tiles(self) -> Tiled:
        """Return a tiled copy for native code."""
        return Tiled.of(self.bits[None], self.scales, self.cols, self.group_size)

    def operands(self) -> reference.Operands:
        """Return the operands of the lookup reference."""
        wide = self.scales.expand(self.rows, 1) if self.scales.ndim < 2 else self.scales
        width = self.bits.shape[1]
        group = width if self.group_size is None else max(1, min(width, -(-self.group_size // 8)))
        return reference.Operands(self.bits[None], wide, None, group)
