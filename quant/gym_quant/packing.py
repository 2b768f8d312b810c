"""Pack sign bits into bytes; the public interface to ``gym_quant.kernels``.

The bit order is fixed by format version 1 and tested by golden files: bit = 1 where the value is >= 0; bits run along
the last (input) dimension, least significant bit first; every row is padded to a whole byte with zero bits,
which readers ignore.
"""

from __future__ import annotations

from gym_quant.kernels.signs import pack_signs, unpack_signs

__all__ = ["pack_signs", "packed_width", "unpack_signs"]


def packed_width(cols: int) -> int:
    """Return the number of bytes per packed row of ``cols`` signs."""
    return (cols + 7) // 8
