"""Read the header of a GGUF file: its values and the locations of its tensors, checked against the file size.

The layout follows ggml's ``docs/gguf.md``, versions 2 and 3, little-endian: magic, version, counts, key-value pairs,
tensor infos, padding, data. Arrays of numbers become numpy arrays, so that memory stays proportional to the number of
bytes read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_HEADER_BYTES = 256 << 20
_MAX_NAME = 1 << 12
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor.

    Attributes:
        name: Name in the file, such as ``blk.0.attn_q.weight``.
        shape: Shape in torch's order.
        type: Value of its ``gguf.GGMLQuantizationType``.
        start: Offset of its first byte in the file.
        bytes: Size in bytes in the file.
        file: File that contains it, if the model has several.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    start: int
    bytes: int
    file: Path


@dataclass(frozen=True)
class Header:
    """The contents of a file's header.

    Attributes:
        file: Path of the file.
        values: Key-value pairs; arrays of numbers are numpy arrays, arrays of strings are lists.
        tensors: Tensors by name.
    """

    file: Path
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(file: Path) -> Header:
    """Read the header of one file.

    Raises:
        GymError: ``MODEL_INVALID`` with the file and the problem.
    """
    size = file.stat().st_size
    if size < 24:
        raise invalid(file, f"{counted(size, 'byte', 'are')} too few for a GGUF file")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _HeaderCursor(file, data, size).header()


def invalid(file: Path, why: str, hint: str = "fetch the file again, or use another one") -> GymError:
    """Return the error for an unreadable GGUF file."""
    return GymError(ErrorCode.MODEL_INVALID, f"{file}: {why}", hint)


class _HeaderCursor:
    """A read position in the file that only moves forward, and never past the end."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self._file, self._data, self._size, self._at = file, data, size, 4
        self._end = min(size, MAX_HEADER_BYTES)

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            raise invalid(self._file, "does not begin like a GGUF file")
        (version,) = self._numbers("<I")
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            raise invalid(
                self._file,
                "is big-endian" if swapped else f"is GGUF version {version}; 2 and 3 are supported",
            )
        count, keys = self._numbers("<QQ")
        if count > MAX_TENSORS or keys > MAX_KEYS:
            raise invalid(self._file, f"claims to have {counted(count, 'tensor')} and {counted(keys, 'key')}")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string(_MAX_NAME)
            if key in values:
                raise invalid(self._file, f"has the key {plain(key, 80)} twice")
            (kind,) = self._numbers("<I")
            values[key] = self._value(kind, key)
        infos = [self._info() for _ in range(count)]
        alignment = values.get("general.alignment", 32)
        is_number = isinstance(alignment, int) and 0 < alignment <= _MAX_ALIGNMENT
        if not is_number or alignment & (alignment - 1):
            raise invalid(self._file, f"general.alignment is {plain(str(alignment), 40)}")
        start = -(-self._at // alignment) * alignment
        return Header(self._file, values, self._tensors(infos, start, alignment))

    def _tensors(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        total = 0
        for name, shape, kind, offset in infos:
            shown = plain(name, 80)
            num_bytes = self._tensor_bytes(shown, shape, kind)
            total += num_bytes
            if offset % alignment or start + offset + num_bytes > self._size:
                raise invalid(
                    self._file,
                    f"tensor {shown} is at bytes {start + offset} to {start + offset + num_bytes} of {self._size}",
                )
            if name in tensors:
                raise invalid(self._file, f"has the tensor {shown} twice")
            tensors[name] = StoredTensor(name, shape, kind, start + offset, num_bytes, self._file)
        if total > self._size:
            room = counted(self._size, "byte")
            raise invalid(self._file, f"has {room}, too few for tensors of {counted(total, 'byte')}")
        return tensors

    def _tensor_bytes(self, shown: str, shape: tuple[int, ...], kind: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise invalid(
                self._file, f"tensor {shown} is of type {kind}, which the gguf package does not know"
            ) from error
        if not shape or min(shape) < 1 or prod(shape) > 1 << 48:
            raise invalid(self._file, f"tensor {shown} has shape {list(shape)}")
        if shape[-1] % block:
            raise invalid(
                self._file,
                f"tensor {shown} has rows of {counted(shape[-1], 'value')}, not a multiple of {block}",
            )
        return prod(shape) // block * bytes_per_block

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(_MAX_NAME)
        (dims,) = self._numbers("<I")
        if dims > _MAX_DIMS:
            raise invalid(self._file, f"tensor {plain(name, 80)} has {dims} dimensions")
        shape = self._numbers(f"<{dims}Q")
        kind, offset = self._numbers("<IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._array(_SCALARS[kind], 1)[0].item()
        if kind == _STRING:
            return self._string(self._size)
        if kind != _ARRAY:
            raise invalid(self._file, f"{plain(key, 80)} is of the unknown type {kind}")
        inner, count = self._numbers("<IQ")
        if inner in _SCALARS:
            return self._array(_SCALARS[inner], count)
        if inner != _STRING or count > (self._end - self._at) // 8:
            raise invalid(
                self._file, f"{plain(key, 80)} is an array of {counted(count, 'value')} of type {inner}"
            )
        return [self._string(self._size) for _ in range(count)]

    def _array(self, dtype: np.dtype[Any], count: int) -> np.ndarray:
        return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)

    def _string(self, max_bytes: int) -> str:
        (length,) = self._numbers("<Q")
        if length > max_bytes:
            raise invalid(self._file, f"has a string of {counted(length, 'byte')} at byte {self._at}")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise invalid(self._file, f"has a string that is not UTF-8 before byte {self._at}") from error

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, count: int) -> bytes:
        if count > self._end - self._at:
            where = "the file's end" if self._end == self._size else f"byte {self._end}"
            raise invalid(self._file, f"its header continues past {where}")
        data = self._data[self._at : self._at + count]
        self._at += count
        return data
