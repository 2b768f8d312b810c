"""The base class of built-in linear formats: tiles of 32 outputs, multiplied by native code (``csrc/linear.h``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels.linear import LinearTiles, is_vectorised, pack_linear
from gym_quant.kernels.linear_reference import dtype_of, group_of, scales_are_finite, shape_of
from gym_quant.kernels.program import Program
from gym_quant.linear import PackedLinear, check_product

_BLOCK = 1 << 20
"""Number of weights decoded at a time for a product with many rows."""
_LARGEST = 3.3e38
"""Maximum weight; larger ones may round to infinity."""


class TiledLinear(PackedLinear):
    """Tiles that a native kernel reads as one stream.

    Few rows are multiplied tile by tile. From ``many_rows`` rows on, bfloat16 products are used if the processor has
    them (AVX-512 BF16), as for bfloat16 weights with any number of rows; without vector instructions, torch then
    multiplies blocks decoded to float32.

    Attributes:
        code: Number of the format in native code.
        default_group: Columns that share a scale; None if there are no scales.
        reach: The largest weight in units of ``unit``.
        many_rows: See above; chosen by measurement.
    """

    code: ClassVar[int]
    default_group: ClassVar[int | None]
    reach: ClassVar[float]
    many_rows: ClassVar[int]

    def __init__(self, tiles: Tensor, rows: int, cols: int, group: int, unit: float) -> None:
        """Use ``pack`` or ``of`` instead."""
        self.rows, self.cols, self.group_size = rows, cols, group
        self._kernel = LinearTiles(self.code, tiles, rows, cols, group, unit)

    @property
    def nbytes(self) -> int:
        return self._kernel.tiles.nbytes

    @classmethod
    def pack(cls, weight: Tensor, group_size: int | None = None) -> Self:
        if weight.ndim != 2 or not weight.numel():
            raise CodecError(f"weights are {list(weight.shape)}, not [out, in]")
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CodecError(f"weights are {weight.dtype}, not float32, float16 or bfloat16")
        group = cls._checked_group(group_size)
        weight = weight.detach().cpu()
        if weight.dtype == torch.float16:
            weight = weight.float()
        low, high = (float(end) for end in torch.aminmax(weight))
        most = max(-low, high)
        if not most <= _LARGEST:
            raise CodecError("a weight is not finite, or above 3.3e38 in size")
        unit = cls._unit(most)
        rows, cols = weight.shape
        tiles = pack_linear(cls.code, weight.contiguous(), group, unit)
        return cls(tiles, rows, cols, group, unit)

    def multiply(self, x: Tensor, y: Tensor) -> None:
        n = len(x)
        if not (
            x.shape == (n, self.cols)
            and y.shape == (n, self.rows)
            and x.dtype is y.dtype is torch.float32
            and x.is_contiguous()
            and y.is_contiguous()
            and x.is_cpu
            and y.is_cpu
        ):
            check_product(x, y, self.rows, self.cols)
        if n < self.many_rows:
            self._kernel.multiply(x, y)
        elif is_vectorised():
            self._kernel.multiply(x, y, many=True)
        else:
            self._multiply_blocks(x, y)

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        if len(x) >= self.many_rows:
            return False
        program.multiply(self._kernel.address, x, y)
        return True

    def decode_block(self, start: int, stop: int) -> Tensor:
        if not 0 <= start <= stop <= self.rows:
            raise CodecError(f"rows from {start} to {stop} are not within 0 to {self.rows}")
        return self._kernel.decode(start, stop)

    def _multiply_blocks(self, x: Tensor, y: Tensor) -> None:
        step = max(32, _BLOCK // self.cols // 32 * 32)
        for start in range(0, self.rows, step):
            stop = min(self.rows, start + step)
            torch.mm(x, self._kernel.decode(start, stop).T, out=y[:, start:stop])

    @classmethod
    def _checked_group(cls, group_size: int | None) -> int:
        if cls.default_group is None:
            if group_size is not None:
                raise CodecError(f"group_size is {group_size}, but {cls.format} has no scales")
            return 2  # required by the layout, which has pairs of columns
        group = cls.default_group if group_size is None else group_size
        if group not in range(8, 257, 8):
            raise CodecError(f"group_size is {group}, not a multiple of 8 from 8 to 256")
        return group

    @classmethod
    def _unit(cls, most: float) -> float:
        """Return the power of two that scales the largest weight to at most ``reach``."""
        if cls.default_group is None or most == 0:
            return 1.0
        mantissa, exponent = math.frexp(most / cls.reach)
        return 2.0 ** max(-100, exponent - (mantissa == 0.5))

    def tensors(self) -> dict[str, Tensor]:
        tiles = {"tiles": self._kernel.tiles}
        return tiles if self.default_group is None else tiles | {"unit": torch.tensor([self._kernel.unit])}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], rows: int, cols: int) -> Self:
        if rows < 1 or cols < 1:
            raise CodecError(f"weights are [{rows}, {cols}]")
        expected = {"tiles"} if cls.default_group is None else {"tiles", "unit"}
        if set(tensors) != expected:
            raise CodecError(f"tensors are {sorted(tensors)}, not {sorted(expected)}")
        tiles, group, unit = tensors["tiles"], 2, 1.0
        if cls.default_group is not None:
            group = cls._checked_group(group_of(cls.code, tiles))
            unit = _checked_unit(tensors["unit"])
        shape, dtype = shape_of(cls.code, rows, cols, group), dtype_of(cls.code)
        if tiles.shape != shape or tiles.dtype != dtype or not tiles.is_cpu or not tiles.is_contiguous():
            raise CodecError(
                f"tiles are {list(tiles.shape)} {tiles.dtype}, not {list(shape)} {dtype}, contiguous on the CPU"
            )
        if cls.default_group is not None and not scales_are_finite(cls.code, tiles):
            raise CodecError("tiles hold a scale that is not finite")
        return cls(tiles, rows, cols, group, unit)


def _checked_unit(unit: Tensor) -> float:
    if unit.dtype != torch.float32 or unit.shape != (1,):
        raise CodecError(f"unit is {list(unit.shape)} {unit.dtype}, not [1] float32")
    value = float(unit)
    if not 2.0**-100 <= value <= 2.0**127 or math.frexp(value)[0] != 0.5:
        raise CodecError(f"unit is {value}, not a power of two from 2^-100 to 2^127")
    return value
