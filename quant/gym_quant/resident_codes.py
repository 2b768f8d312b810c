"""The codes of a ``LevelCodec`` in serving form: byte planes, or sign planes for lookup.

A byte packs as many codes as fit, as ``sum_i code_i * levels**i``, where ``code_i`` is from plane ``i``: byte ``j``
of a row has columns ``j``, ``j + width``, ``j + 2 * width``, ... Planes unpack into contiguous columns; adjacent codes
in a byte would have to be interleaved. Files keep the order of ``gym_quant.bitstream``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gym_quant.bitstream import Bytes, Floats
from gym_quant.kernels import dispatch
from gym_quant.kernels.level_tiles import LevelPlanes, ResidentTiles
from gym_quant.resident import Fields, Resident, ResidentLevels

_COMPARED = 16
"""Maximum number of codes for which one comparison per code is faster than a table."""


class Grid(Protocol):
    """The part of ``LevelCodec`` used here; a protocol, since ``levels`` imports this module."""

    @property
    def levels(self) -> int: ...

    def __hash__(self) -> int: ...

    def fields(self, symmetric: bool) -> tuple[str, ...]: ...

    def dequantise(self, codes: Bytes, shared: tuple[Floats, ...], symmetric: bool) -> Floats: ...


class ResidentCodes(ResidentLevels):
    """Codes packed in planes, with their scales and offsets.

    Args:
        codec: The codec of the payload.
        fields: The payload, with its codes packed in planes (``to_planes``).
        shape: Rows and columns.
        symmetric: The payload's ``symmetric`` parameter.
        group: Number of columns that share a scale and offset; None if all do.
        device: The device that holds the fields.
        largest: A bound on the magnitude of the values.
    """

    def __init__(
        self,
        codec: Grid,
        fields: Fields,
        shape: tuple[int, int],
        symmetric: bool,
        group: int | None,
        device: torch.device,
        largest: float,
    ) -> None:
        def decode(some: dict[str, Tensor]) -> Tensor:
            return _decoded(codec, some, shape[1], symmetric, group)

        super().__init__(fields, *shape, decode, device, largest)
        self._codec, self._symmetric, self._group = codec, symmetric, group

    def for_kernel(self, kernel: str) -> Resident:
        """Return sign planes for the lookup kernels if native code supports them, else a form that decodes levels."""
        planes, group = LevelPlanes.of(_coefficients(self._codec, self._symmetric)), self._group
        whole_bytes = group is None or group % 8 == 0 or group >= self.cols
        codes = self._fields["codes"]
        native = codes.device.type == "cpu" and dispatch.path() != "torch"
        if kernel == "exact" or planes is None or not whole_bytes or not native:
            return super().for_kernel(kernel)
        bits = np.empty((len(planes.shifts), self.rows, -(-self.cols // 8)), dtype=np.uint8)
        for start, stop in self.blocks():
            some = from_planes(codes[start:stop], self._codec.levels, self.cols).to(torch.uint8)
            bits[:, start:stop] = planes.bits(some.numpy())
        scales, *others = (self._fields[name] for name in self._codec.fields(self._symmetric))
        offsets = others[0] if others else None
        tiled = planes.tiled(torch.from_numpy(bits), scales, offsets, self.cols, group)
        return ResidentTiles(tiled, self.largest())


def _decoded(codec: Grid, fields: dict[str, Tensor], cols: int, symmetric: bool, group: int | None) -> Tensor:
    """Decode rows of codes in planes, bit-identical to the codec: ``[n, cols]`` float32 on their device."""
    codes = from_planes(fields["codes"], codec.levels, cols)
    tables = _coefficients(codec, symmetric)
    last = max(at for at, table in enumerate(tables) if not _is_constant(table))
    values: Tensor | None = None
    for at, (field, table) in enumerate(zip(codec.fields(symmetric), tables, strict=True)):
        numbers = fields[field].to(torch.float32)
        if values is not None and _is_constant(table):
            for part, shared in _by_group(values, numbers, group):
                part.add_(shared * table[0])
            continue
        term = _looked_up(table, codes, in_place=at == last)
        for part, shared in _by_group(term, numbers, group):
            part.mul_(shared)
        values = term if values is None else values.add_(term)
    assert values is not None
    return values


def _is_constant(table: tuple[float, ...]) -> bool:
    return len(set(table)) == 1


@functools.cache
def _coefficients(codec: Grid, symmetric: bool) -> tuple[tuple[float, ...], ...]:
    """Return, for each scale or offset, its factor for every code."""
    codes, count = np.arange(codec.levels, dtype=np.uint8), len(codec.fields(symmetric))
    units = [tuple(np.full(1, at == place, np.float32) for at in range(count)) for place in range(count)]
    return tuple(tuple(codec.dequantise(codes, unit, symmetric).tolist()) for unit in units)


def _looked_up(table: tuple[float, ...], codes: Tensor, in_place: bool) -> Tensor:
    """Map every code (float32, may be overwritten) to the table's value, in few vector operations."""
    start, step = table[0], table[1] - table[0]
    if all(value == start + step * code for code, value in enumerate(table)):
        return (codes if in_place else codes.clone()).mul_(step).add_(start)
    if len(table) > _COMPARED:
        return torch.tensor(table, device=codes.device)[codes.to(torch.int32)]
    used = [(code, value) for code, value in enumerate(table) if value]
    values = (codes == used[0][0]).to(torch.float32).mul_(used[0][1])
    for code, value in used[1:]:
        values.add_((codes == code).to(torch.float32), alpha=value)
    return values


def _by_group(values: Tensor, numbers: Tensor, group: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of ``values [n, cols]`` with the scales or offsets of their groups, in matching shapes."""
    cols = values.shape[1]
    if group is None or group >= cols:
        yield values, numbers
        return
    whole = cols // group
    if whole:
        yield values[:, : whole * group].view(len(values), whole, group), numbers[:, :whole, None]
    if whole * group < cols:
        yield values[:, whole * group :], numbers[:, whole:]


def codes_a_byte(levels: int) -> int:
    """Return how many codes below ``levels`` (2 to 256) fit into a byte."""
    return next(n for n in range(8, 0, -1) if levels**n <= 256)


def to_planes(codes: Bytes, levels: int) -> Bytes:
    """Pack ``[rows, cols]`` codes below ``levels`` to ``[rows, width]``."""
    rows, cols = codes.shape
    each = codes_a_byte(levels)
    width = -(-cols // each)
    packed = np.zeros((rows, width), dtype=np.uint8)
    for place in range(each):
        part = codes[:, place * width : (place + 1) * width]
        packed[:, : part.shape[1]] += part * np.uint8(levels**place % 256)
    return packed


def from_planes(packed: Tensor, levels: int, cols: int) -> Tensor:
    """Unpack on any device: ``[rows, width]`` uint8 to ``[rows, cols]`` float32."""
    each, width = codes_a_byte(levels), packed.shape[1]
    out = torch.empty(len(packed), cols, device=packed.device)
    planes = [out[:, place * width : (place + 1) * width] for place in range(each)]
    if levels & (levels - 1) == 0:
        for place, plane in enumerate(planes):
            some, bits = packed[:, : plane.shape[1]], 8 // each
            shifted = some >> (place * bits) if place else some
            plane.copy_(shifted & (levels - 1) if place < each - 1 else shifted)
        return out
    left = packed.to(torch.float32)
    for plane in planes:
        # for integers below 256, adding 0.5 makes the division exact
        above = torch.floor((left + 0.5).mul_(1.0 / levels))
        torch.sub(left[:, : plane.shape[1]], above[:, : plane.shape[1]], alpha=levels, out=plane)
        left = above
    return out
