"""Pack small unsigned codes into bytes: 1, 2, 4 or 8 bits each, or five trits per byte.

The order is fixed by format version 1 and tested by golden files: codes run along the last (input) dimension, the first
in the least significant place of the first byte; every row is padded to a whole byte with zeros, which readers ignore.
With bits, code ``i`` of a byte is at bit ``i * bits``. With trits, a byte is ``sum_i t_i * 3**i`` for its five digits
``t_i`` in {0, 1, 2}, so that bytes above 242 do not occur.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[Any]

TRITS_A_BYTE = 5
LARGEST_TRIT_BYTE = 3**TRITS_A_BYTE - 1

_POWERS = np.array([3**i for i in range(TRITS_A_BYTE)], dtype=np.uint8)
_DIGITS = (np.arange(256, dtype=np.uint8)[:, None] // _POWERS % 3).astype(np.uint8)


def packed_bits_width(cols: int, bits: int) -> int:
    """Return the number of bytes per row of ``cols`` codes of ``bits`` bits each."""
    return -(-cols * bits // 8)


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Pack ``[rows, cols]`` codes below ``2**bits`` (``bits`` in 1, 2, 4, 8) to ``[rows, ceil(cols * bits / 8)]``."""
    if bits == 8:
        return np.ascontiguousarray(codes)
    each = 8 // bits
    padded = _padded(codes, each)
    packed = np.zeros((codes.shape[0], padded.shape[1] // each), dtype=np.uint8)
    for place in range(each):
        packed |= padded[:, place::each] << np.uint8(place * bits)
    return packed


def unpack_bits(packed: Bytes, bits: int, cols: int) -> Bytes:
    """Invert ``pack_bits``."""
    if bits == 8:
        return packed
    each = 8 // bits
    codes = np.empty((packed.shape[0], packed.shape[1] * each), dtype=np.uint8)
    for place in range(each):
        codes[:, place::each] = (packed >> np.uint8(place * bits)) & np.uint8((1 << bits) - 1)
    return codes[:, :cols]


def packed_trits_width(cols: int) -> int:
    """Return the number of bytes per row of ``cols`` trits."""
    return -(-cols // TRITS_A_BYTE)


def pack_trits(codes: Bytes) -> Bytes:
    """Pack ``[rows, cols]`` codes 0, 1, 2 to ``[rows, ceil(cols / 5)]``."""
    padded = _padded(codes, TRITS_A_BYTE)
    packed = np.zeros((codes.shape[0], padded.shape[1] // TRITS_A_BYTE), dtype=np.uint8)
    for place in range(TRITS_A_BYTE):
        packed += padded[:, place::TRITS_A_BYTE] * _POWERS[place]
    return packed


def unpack_trits(packed: Bytes, cols: int) -> Bytes:
    """Invert ``pack_trits``. Bytes above 242 decode to digits too, so callers must refuse them first."""
    return _DIGITS[packed].reshape(packed.shape[0], -1)[:, :cols]


def _padded(codes: Bytes, multiple: int) -> Bytes:
    rest = -codes.shape[1] % multiple
    return np.pad(codes, ((0, 0), (0, rest))) if rest else codes
