"""Sign bits of a matrix to bytes and back; native kernels go behind these two functions.

Bit order, fixed by format version 1 and held by golden files: bit = 1 where the value is >= 0; bits run along
the last (input) dimension, least significant bit first; every row is padded to a whole byte with zero bits,
which readers ignore.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def packed_width(cols: int) -> int:
    """Bytes of a packed row of ``cols`` signs."""
    return (cols + 7) // 8


def pack_signs(matrix: Tensor) -> Tensor:
    """``[rows, cols]`` float (CPU) to ``[rows, ceil(cols / 8)]`` uint8; 1 where the value is >= 0."""
    bits = (matrix >= 0).numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))


def unpack_signs(packed: Tensor, cols: int) -> Tensor:
    """``[rows, ceil(cols / 8)]`` uint8 to ``[rows, cols]`` float32 of +1.0 and -1.0."""
    bits = np.unpackbits(packed.numpy(), axis=1, count=cols, bitorder="little")
    return torch.from_numpy(bits).to(torch.float32).mul_(2.0).sub_(1.0)
