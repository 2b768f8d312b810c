"""Multiply with the packed weights of a base model (``gym_quant.linear``), with native tiles or torch.

``csrc/linear.h`` describes the layout of the tiles. For int8 and int4, native paths and reference return the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from gym_quant import huge_pages
from gym_quant.kernels import dispatch, linear_reference, native
from gym_quant.kernels.linear_reference import TILE

_KERNELS = {-1: "none", 0: "scalar", 1: "avx2", 2: "avx512", 3: "avx512 vnni", 4: "avx512 bfloat16"}
_HELD = 1 << 19
"""Products of up to this many weights and rows keep the GIL, since they take less than 50 microseconds."""


class _LinearFields(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("unit", c_float),
        ("rows", c_int64),
        ("cols", c_int64),
        ("group", c_int64),
        ("tiles", c_void_p),
    )


class LinearTiles:
    """One packed matrix ``[rows, cols]`` for the kernels. Keeps its tiles alive.

    Args:
        code: ``BFLOAT16``, ``INT8`` or ``INT4``.
        tiles: Contiguous, in the layout of ``csrc/linear.h``.
        group: Columns that share a scale; 2 for bfloat16.
        unit: The power of two of which scales and minima are multiples; 1 for bfloat16.
    """

    def __init__(self, code: int, tiles: Tensor, rows: int, cols: int, group: int, unit: float) -> None:
        self.code, self.tiles, self.cols, self.group, self.unit = code, tiles, cols, group, unit
        self._native = _LinearFields(code, unit, rows, cols, group, tiles.data_ptr())
        self.address = ctypes.addressof(self._native)
        """The address for native code, valid while this object lives."""
        self._held_rows = _HELD // max(1, rows * cols)

    def multiply(self, x: Tensor, y: Tensor, many: bool = False) -> None:
        """Write ``x @ W.T`` into ``y``; both float32, contiguous, on the CPU, of matching shapes.

        Args:
            many: Multiply in bfloat16 if path and processor support it (AVX-512 BF16), which is faster for many rows.
        """
        path = dispatch.path()
        if path == "torch":
            linear_reference.multiply(self.code, self.tiles, self.group, self.unit, x, y)
            return
        n = len(x)
        run = _products()[n <= self._held_rows]
        threads, features = torch.get_num_threads(), native.features()
        status = run(native.CODES[path], threads, features, self.address, many, x.data_ptr(), n, y.data_ptr())
        if status:
            raise MemoryError("gq_linear: no memory for its workspace")

    def decode(self, start: int, stop: int) -> Tensor:
        """Decode rows from ``start`` to ``stop`` as float32 ``[stop - start, cols]``."""
        path = dispatch.path()
        if path == "torch":
            tiles = self.tiles[start // TILE : -(-stop // TILE)]
            values = linear_reference.decode(self.code, tiles, self.group, self.unit)
            return values[start % TILE :][: stop - start, : self.cols].contiguous()
        out = torch.empty(stop - start, self.cols)
        native.linear_decode(path, self.address, start, stop, out)
        return out


def pack_linear(code: int, weight: Tensor, group: int, unit: float) -> Tensor:
    """Pack finite weights ``[rows, cols]``, float32 or bfloat16 and contiguous, into tiles."""
    rows, cols = weight.shape
    path = dispatch.path()
    if path == "torch":
        return linear_reference.pack(code, weight, group, unit)
    tiles = huge_pages.empty(
        linear_reference.shape_of(code, rows, cols, group), linear_reference.dtype_of(code)
    )
    made = _LinearFields(code, unit, rows, cols, group, None)
    native.linear_pack(path, ctypes.addressof(made), weight, tiles)
    return tiles


def is_vectorised() -> bool:
    """Return True if native code uses vector instructions; without them torch's product is faster for many rows."""
    return dispatch.path() in ("avx512", "avx2") and bool((native.features() or 0) & native.HAS_FMA)


def last_linear_kernel() -> str:
    """Return the native kernel of the last product in this process; ``none`` before the first."""
    return _KERNELS[int(native.library().gq_linear_kernel())]


@functools.cache
def _products() -> tuple[Any, Any]:
    """Return ``gq_linear`` in two versions: one releases the GIL, the other keeps it."""
    return native.library().gq_linear, native.library_holding_lock().gq_linear
