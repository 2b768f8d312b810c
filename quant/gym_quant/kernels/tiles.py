"""The bits of a delta in tiles of 64 outputs, the layout of all native products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gym_quant.kernels import dispatch, native_tiles, reference

TILE = 64
MAX_PLANES = 4


@dataclass(frozen=True, eq=False)
class Tiled:
    """``scale * (sum of 2**shift * sign over planes - zero) + offset``; one plane with scales only is signs.

    Attributes:
        bits: ``[tiles, units, planes, 64, 4]`` uint8: a unit is 4 bytes of a row, 32 inputs.
        scales: ``[tiles, groups, 64]`` float32.
        offsets: ``[tiles, groups, 64]`` float32, or None.
        rows: ``out``.
        cols: ``in``.
        group: Bytes of a row that share a scale.
        shifts: The planes' shifts, from 0 to 3.
        zero: An integer.
    """

    bits: Tensor
    scales: Tensor
    offsets: Tensor | None
    rows: int
    cols: int
    group: int
    shifts: tuple[int, ...] = (0,)
    zero: int = 0

    @classmethod
    def of(
        cls,
        bits: Tensor,
        scales: Tensor,
        cols: int,
        group: int | None,
        *,
        shifts: Sequence[int] = (0,),
        zero: int = 0,
        offsets: Tensor | None = None,
    ) -> Tiled:
        """Copy bits ``[planes, out, ceil(in / 8)]`` and scales (and offsets) per tensor, row or group.

        Args:
            bits: uint8, padding bits zero.
            scales: ``[1]``, ``[out, 1]`` or ``[out, groups]`` of any float dtype.
            cols: ``in``.
            group: Inputs that share a scale, a multiple of 8 or at least ``cols``; None: one scale per tensor or row.
            shifts: The planes' shifts, at most ``MAX_PLANES`` of them.
            zero: See the class.
            offsets: As ``scales``.
        """
        rows, width = bits.shape[1:]
        size = width if group is None else max(1, min(width, -(-group // 8)))
        tiled_offsets = None if offsets is None else _tiled(offsets, rows)
        tiles = native_tiles.tile(bits.contiguous())
        return cls(tiles, _tiled(scales, rows), tiled_offsets, rows, cols, size, tuple(shifts), zero)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.bits.nbytes + self.scales.nbytes + offsets

    @cached_property
    def address(self) -> tuple[int, ...]:
        """Return the addresses for ``native_tiles.Deltas``; the tensors must stay alive."""
        shifts = sum(shift << (4 * plane) for plane, shift in enumerate(self.shifts))
        offsets = 0 if self.offsets is None else self.offsets.data_ptr()
        numbers = (self.group, len(self.shifts), self.zero, shifts)
        return (self.bits.data_ptr(), self.scales.data_ptr(), offsets, *numbers)

    def decode_rows(self, rows: Tensor) -> Tensor:
        """Decode rows by number (``[n]`` int64, any order): ``[n, in]`` float32."""
        row_numbers = rows.to(torch.int64).contiguous().numpy()
        out = torch.empty(len(row_numbers), self.cols)
        chosen = dispatch.path()
        path = "scalar" if chosen == "torch" else chosen  # same bits; it has no reference
        none = np.zeros(len(row_numbers), dtype=np.int64)
        native_tiles.decode_tiles(
            path, native_tiles.Deltas(self.rows, [self.address]), none, row_numbers, out, False
        )
        return out

    def decode_block(self, start: int, stop: int) -> Tensor:
        """Decode rows ``start`` to ``stop``: ``[stop - start, in]`` float32."""
        return self.decode_rows(torch.arange(start, stop))

    def operands(self) -> reference.Operands:
        """Return a row-major copy for the reference."""
        planes, width = len(self.shifts), (self.cols + 7) // 8
        bits = self.bits.permute(2, 0, 3, 1, 4).reshape(planes, -1, 4 * self.bits.shape[1])
        offsets = None if self.offsets is None else self._rows_of(self.offsets)
        plain = bits[:, : self.rows, :width].contiguous()
        return reference.Operands(
            plain, self._rows_of(self.scales), offsets, self.group, self.shifts, self.zero
        )

    def _rows_of(self, numbers: Tensor) -> Tensor:
        return numbers.transpose(1, 2).reshape(-1, numbers.shape[1])[: self.rows].contiguous()


def _tiled(numbers: Tensor, rows: int) -> Tensor:
    """Tile ``[1]``, ``[rows, 1]`` or ``[rows, groups]`` to ``[tiles, groups, 64]`` float32, zero-padded."""
    wide = numbers.expand(rows, 1) if numbers.ndim < 2 else numbers
    tiles = -(-rows // TILE)
    padded = torch.zeros(tiles * TILE, wide.shape[1])
    padded[:rows] = wide
    return padded.reshape(tiles, TILE, -1).transpose(1, 2).contiguous()
