"""The native extension by ctypes, which releases the interpreter's lock: arguments in, arrays out, nothing decided.

Callers (the modules beside this one) check shapes and dtypes; tensors here are contiguous and on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

VERSION = 1
HAS_AVX2, HAS_AVX512, HAS_VPOPCNTDQ = 1, 2, 4

TRIMMED, MEDIAN, AROUND, WEIGHTED = range(4)

_CODES = {"scalar": 0, "avx2": 1, "avx512": 2}
_NO_MEMORY, _NOT_FINITE = 1, 2
_SIGNATURES: dict[str, list[Any]] = {
    "gq_pack": [c_int, c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_encode": [c_int] * 3 + [c_void_p] * 3 + [c_int64] * 3 + [c_void_p] * 2,
    "gq_decode": [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int],
    "gq_hamming": [c_int, c_int, c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_votes": [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "gq_majority": [c_int, c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_sign_products": [c_int] * 3 + [c_void_p] * 2 + [c_int64] * 4 + [c_void_p],
    "gq_signed_votes": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 3 + [c_double] + [c_void_p] * 2,
    "gq_signed_trimmed": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 5 + [c_double, c_void_p],
    "gq_tile": [c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_matmul": [c_int] * 3
    + [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
    "gq_order": [c_int] * 3 + [c_void_p] * 2 + [c_int64] * 3 + [c_void_p],
    "gq_combine": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 2 + [c_void_p],
    "gq_combinations": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 3 + [c_void_p],
    "gq_products": [c_int] * 2 + [c_void_p] + [c_int64] * 2 + [c_void_p],
}


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    try:
        module = importlib.import_module("gym_quant.kernels._native")
        library = ctypes.CDLL(str(module.__file__))
        version = int(library.gq_version())
    except (ImportError, OSError, AttributeError) as error:
        return None, f"the native extension is not there: {error}; it is built where pip finds a C++ compiler"
    if version != VERSION:
        return (
            None,
            f"the native extension is of build {version}, wanted {VERSION}: install the package again",
        )
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:  # built before there was this function
            return None, f"the native extension lacks {name}: install the package again"
        function.argtypes = arguments
        function.restype = c_int
    return library, ""


def absence() -> str:
    """Why there is no native code; empty where there is."""
    return _load()[1]


@functools.cache
def features() -> int | None:
    """``HAS_*`` bits of this processor; ``None`` without the extension."""
    library = _load()[0]
    return None if library is None else int(library.gq_features())


def pack(path: str, matrix: Tensor) -> Tensor:
    """``[rows, cols]`` float32 to ``[rows, ceil(cols / 8)]`` uint8."""
    rows, cols = matrix.shape
    out = torch.empty(rows, (cols + 7) // 8, dtype=torch.uint8)
    _call("gq_pack", path, matrix.data_ptr(), rows, cols, out.data_ptr())
    return out


def encode(
    path: str, tuned: Tensor, base: Tensor | None, group: int | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Bits, and sums of magnitudes ``[rows, groups]`` float64 (one group a row where ``group`` is None)."""
    rows, cols = tuned.shape
    bits = torch.empty(rows, (cols + 7) // 8, dtype=torch.uint8)
    sums = torch.empty(rows, 1 if group is None else -(-cols // group), dtype=torch.float64)
    kinds = int(tuned.dtype == torch.bfloat16) | 2 * int(base is not None and base.dtype == torch.bfloat16)
    inputs = (tuned.data_ptr(), _pointer(base), _pointer(residual))
    _call("gq_encode", path, kinds, *inputs, rows, cols, group or 0, bits.data_ptr(), sums.data_ptr())
    return bits, sums


def decode(path: str, bits: Tensor, scales: Tensor, group: int | None, out: Tensor, add: bool) -> None:
    """Write (or add) ``scale * sign`` into ``out`` ``[rows, cols]`` float32."""
    rows, cols = out.shape
    pointers = (bits.data_ptr(), scales.data_ptr())
    _call("gq_decode", path, *pointers, rows, cols, group or 0, out.data_ptr(), int(add))


def hamming(path: str, packed: Tensor) -> Tensor:
    """``[n, bytes]`` to ``[n, n]`` int64."""
    n, width = packed.shape
    out = torch.empty(n, n, dtype=torch.int64)
    _call("gq_hamming", path, features(), packed.data_ptr(), n, width, out.data_ptr())
    return out


def votes(path: str, packed: Tensor, weights: Tensor | None) -> Tensor:
    """``[n, bytes]`` to ``[8 * bytes]`` int32."""
    n, width = packed.shape
    out = torch.empty(8 * width, dtype=torch.int32)
    _call("gq_votes", path, packed.data_ptr(), _pointer(weights), n, width, out.data_ptr())
    return out


def majority(path: str, packed: Tensor) -> Tensor:
    """``[n, bytes]`` to ``[bytes]``."""
    n, width = packed.shape
    out = torch.empty(width, dtype=torch.uint8)
    _call("gq_majority", path, packed.data_ptr(), n, width, out.data_ptr())
    return out


def sign_products(
    path: str, bits: Sequence[Tensor], scales: Sequence[Tensor], cols: int, group: int | None
) -> Tensor:
    """``[n, n]`` float64 of ``n`` packed matrices and their float32 scales."""
    n = len(bits)
    out = torch.empty(n, n, dtype=torch.float64)
    rows, factors = _pointers(bits), _pointers(scales)
    sizes = (n, bits[0].shape[0], cols, group or 0)
    _call("gq_sign_products", path, features(), rows.ctypes.data, factors.ctypes.data, *sizes, out.data_ptr())
    return out


def signed_votes(path: str, bits: Sequence[Tensor], weights: Tensor, out: Tensor, unit: float) -> None:
    """Write the sums into ``out`` ``[rows, cols]`` int32 or, times ``unit``, float32."""
    packed = _pointers(bits)
    targets = (out.data_ptr(), None) if out.dtype == torch.int32 else (None, out.data_ptr())
    inputs = (packed.ctypes.data, weights.data_ptr())
    _call("gq_signed_votes", path, *inputs, len(bits), *out.shape, unit, *targets)


def signed_trimmed(
    path: str, bits: Sequence[Tensor], mixing: Tensor, trim: int, unit: float, out: Tensor
) -> None:
    """Write ``unit`` times the trimmed sums of the mixed rows into ``out`` ``[rows, cols]`` float32."""
    packed = _pointers(bits)
    inputs = (packed.ctypes.data, mixing.data_ptr(), *mixing.shape)
    _call("gq_signed_trimmed", path, *inputs, *out.shape, trim, unit, out.data_ptr())


def tile(bits: Tensor) -> Tensor:
    """``[rows, bytes]`` to ``[ceil(rows / 64), bytes, 64]``."""
    rows, width = bits.shape
    out = torch.empty(-(-rows // 64), width, 64, dtype=torch.uint8)
    library = _load()[0]
    assert library is not None
    if library.gq_tile(torch.get_num_threads(), bits.data_ptr(), rows, width, out.data_ptr()):
        raise MemoryError("gq_tile")
    return out


def matmul(
    path: str,
    exact: bool,
    x: Tensor,
    y: Tensor,
    variants: Sequence[tuple[Tensor, Tensor, int]],
    index: Sequence[int],
) -> bool:
    """Add every row's delta term to ``y``; ``variants`` are (tiles, tiled scales, bytes of a group).

    Returns:
        False when an activation is not finite (look-up only; ``y`` is untouched).
    """
    addresses = [(tiles.data_ptr(), scales.data_ptr(), group) for tiles, scales, group in variants]
    return matmul_many(path, exact, x, y, VariantPointers(addresses), np.array(index, dtype=np.int64))


Address = tuple[int, int, int]
"""Of a variant's tiles and tiled scales, and the bytes of a group."""


class VariantPointers:
    """Addresses of many variants as the library takes them; the holder keeps their tensors alive."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        # One column after the other; array, since numpy takes three times as long to make and to return its address.
        self._array = array("Q", chain.from_iterable(zip(*addresses, strict=True)))
        self._count = len(addresses)
        start, step = self._array.buffer_info()[0], 8 * self._count
        self.pointers = (start, start + step, start + 2 * step)

    def __len__(self) -> int:
        return self._count


def matmul_many(
    path: str,
    exact: bool,
    x: Tensor,
    y: Tensor,
    variants: VariantPointers,
    index: np.ndarray[Any, np.dtype[np.int64]],
) -> bool:
    """``matmul`` for variants whose pointers are collected already; ``index`` ``[batch]`` int64."""
    batch, cols = x.shape
    inputs = (x.data_ptr(), batch, cols, y.data_ptr(), y.shape[1])
    status = _call(
        "gq_matmul", path, int(exact), *inputs, len(variants), *variants.pointers, index.ctypes.data
    )
    return status != _NOT_FINITE


def order(path: str, rule: int, updates: Tensor, weights: Tensor | None, amount: int, out: Tensor) -> None:
    """``[n, d]`` float32 to ``out`` ``[d]`` by a rule that sorts; ``amount`` is trimmed or kept."""
    n, d = updates.shape
    _call("gq_order", path, rule, updates.data_ptr(), _pointer(weights), n, d, amount, out.data_ptr())


def combine(path: str, updates: Tensor, weights: Tensor, out: Tensor) -> None:
    """Weighted sum of the rows ``[n, d]`` float32 into ``out`` ``[d]`` float32."""
    n, d = updates.shape
    _call("gq_combine", path, updates.data_ptr(), weights.data_ptr(), n, d, out.data_ptr())


def combinations(path: str, updates: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Weighted sums of the rows ``[n, d]`` float32, a row of ``matrix`` ``[m, n]`` each, into ``out`` ``[m, d]``."""
    (n, d), m = updates.shape, len(matrix)
    _call("gq_combinations", path, updates.data_ptr(), matrix.data_ptr(), n, d, m, out.data_ptr())


def products(path: str, updates: Tensor, out: Tensor) -> None:
    """Add the inner products of the rows ``[n, d]`` float32 to ``out`` ``[n, n]`` float64."""
    n, d = updates.shape
    _call("gq_products", path, updates.data_ptr(), n, d, out.data_ptr())


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)


def _call(name: str, path: str, *arguments: int | float | None) -> int:
    library = _load()[0]
    assert library is not None
    status = int(getattr(library, name)(_CODES[path], torch.get_num_threads(), *arguments))
    if status == _NO_MEMORY:
        raise MemoryError(f"{name}: no memory for its work space")
    return status
