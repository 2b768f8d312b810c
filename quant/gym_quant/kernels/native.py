"""ctypes bindings for the native extension, which release the GIL.

Callers (the other modules of this package) check shapes and dtypes; tensors here are contiguous and on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

VERSION = 2
HAS_VBMI = 8
HAS_AVX2, HAS_AVX512, HAS_VPOPCNTDQ = 1, 2, 4
HAS_FMA, HAS_VNNI, HAS_BF16 = 16, 32, 64

TRIMMED, MEDIAN, AROUND, WEIGHTED = range(4)

_hidden: ContextVar[int] = ContextVar("gym_kernels_hidden", default=0)
CODES = {"scalar": 0, "avx2": 1, "avx512": 2}
_NO_MEMORY, NOT_MADE = 1, 2
_SIGNATURES: dict[str, list[Any]] = {
    "gq_attend": [c_int] * 2
    + [c_void_p] * 3
    + [c_int64] * 3
    + [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int]
    + [c_int64] * 4
    + [c_float, c_int64],
    "gq_pack": [c_int, c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_encode": [c_int] * 3 + [c_void_p] * 3 + [c_int64] * 3 + [c_void_p] * 2,
    "gq_decode": [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int],
    "gq_hamming": [c_int, c_int, c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_votes": [c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "gq_majority": [c_int, c_int, c_void_p, c_int64, c_int64, c_void_p],
    "gq_sign_products": [c_int] * 3 + [c_void_p] * 2 + [c_int64] * 4 + [c_void_p],
    "gq_signed_votes": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 3 + [c_double] + [c_void_p] * 2,
    "gq_signed_trimmed": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 5 + [c_double, c_void_p],
    "gq_tile": [c_int, c_void_p] + [c_int64] * 3 + [c_void_p],
    "gq_decode_tiles": [c_int] * 2
    + [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64],
    "gq_exact_add": [c_int] * 2
    + [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "gq_lookup_tables": [c_int] * 3 + [c_void_p, c_int64, c_int64] + [c_void_p] * 4,
    "gq_lookup_add": [c_int] * 4
    + [c_void_p] * 4
    + [c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "gq_add_norm": [c_int] * 2 + [c_void_p] * 5 + [c_float] + [c_int64] * 2 + [c_void_p],
    "gq_rotate": [c_int] * 2 + [c_void_p] + [c_int64] * 4 + [c_void_p] * 3 + [c_float] + [c_void_p] * 2,
    "gq_gate": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 3 + [c_void_p],
    "gq_factors_add": [c_int] * 3
    + [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "gq_linear": [c_int] * 3 + [c_void_p, c_int, c_void_p, c_int64, c_void_p],
    "gq_linear_kernel": [],
    "gq_run": [c_int] * 3 + [c_void_p, c_int64],
    "gq_linear_pack": [c_int] * 2 + [c_void_p, c_int] + [c_void_p] * 2,
    "gq_linear_decode": [c_int] * 2 + [c_void_p] + [c_int64] * 2 + [c_void_p],
    "gq_order": [c_int] * 3 + [c_void_p] * 2 + [c_int64] * 3 + [c_void_p],
    "gq_combine": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 2 + [c_void_p],
    "gq_combinations": [c_int] * 2 + [c_void_p] * 2 + [c_int64] * 3 + [c_void_p],
    "gq_products": [c_int] * 2 + [c_void_p] + [c_int64] * 2 + [c_void_p],
}


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """Load the library, or return why it is missing."""
    try:
        module = importlib.import_module("gym_quant.kernels._native")
        library = ctypes.CDLL(str(module.__file__))
        version = int(library.gq_version())
    except (ImportError, OSError, AttributeError) as error:
        return None, f"the native extension is missing: {error}; it is built if pip finds a C++ compiler"
    if version != VERSION:
        return (
            None,
            f"the native extension has build {version}, but {VERSION} is required: reinstall the package",
        )
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:  # a library built before this function existed
            return None, f"the native extension lacks {name}: reinstall the package"
        function.argtypes = arguments
        function.restype = c_int
    return library, ""


def library() -> ctypes.CDLL:
    """Return the library; call this only if ``features()`` is not None."""
    loaded = _load()[0]
    assert loaded is not None
    return loaded


@functools.cache
def library_holding_lock() -> ctypes.PyDLL:
    """Return the library, loaded so that its calls keep the GIL, for calls that take microseconds."""
    held = ctypes.PyDLL(library()._name)
    for name, arguments in _SIGNATURES.items():
        function = getattr(held, name)
        function.argtypes = arguments
        function.restype = c_int
    return held


def absence() -> str:
    """Return why native code is missing; empty if it is present."""
    return _load()[1]


def features() -> int | None:
    """Return this processor's ``HAS_*`` bits, without those hidden by ``without``; None without the extension."""
    bits_found = _features()
    return None if bits_found is None else bits_found & ~_hidden.get()


@contextmanager
def without(bits: int) -> Iterator[None]:
    """Hide these ``HAS_*`` features inside this context (in this thread or task only)."""
    token = _hidden.set(_hidden.get() | bits)
    try:
        yield
    finally:
        _hidden.reset(token)


@functools.cache
def _features() -> int | None:
    library = _load()[0]
    return None if library is None else int(library.gq_features())


def pack(path: str, matrix: Tensor) -> Tensor:
    """Pack ``[rows, cols]`` float32 to ``[rows, ceil(cols / 8)]`` uint8."""
    rows, cols = matrix.shape
    out = torch.empty(rows, (cols + 7) // 8, dtype=torch.uint8)
    call("gq_pack", path, matrix.data_ptr(), rows, cols, out.data_ptr())
    return out


def encode(
    path: str, tuned: Tensor, base: Tensor | None, group: int | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bits, and sums of magnitudes ``[rows, groups]`` float64 (one group per row if ``group`` is None)."""
    rows, cols = tuned.shape
    bits = torch.empty(rows, (cols + 7) // 8, dtype=torch.uint8)
    sums = torch.empty(rows, 1 if group is None else -(-cols // group), dtype=torch.float64)
    kinds = int(tuned.dtype == torch.bfloat16) | 2 * int(base is not None and base.dtype == torch.bfloat16)
    inputs = (tuned.data_ptr(), _pointer(base), _pointer(residual))
    call("gq_encode", path, kinds, *inputs, rows, cols, group or 0, bits.data_ptr(), sums.data_ptr())
    return bits, sums


def decode(path: str, bits: Tensor, scales: Tensor, group: int | None, out: Tensor, add: bool) -> None:
    """Write (or add) ``scale * sign`` into ``out`` ``[rows, cols]`` float32."""
    rows, cols = out.shape
    pointers = (bits.data_ptr(), scales.data_ptr())
    call("gq_decode", path, *pointers, rows, cols, group or 0, out.data_ptr(), int(add))


def hamming(path: str, packed: Tensor) -> Tensor:
    """Compute Hamming distances: ``[n, bytes]`` to ``[n, n]`` int64."""
    n, width = packed.shape
    out = torch.empty(n, n, dtype=torch.int64)
    call("gq_hamming", path, features(), packed.data_ptr(), n, width, out.data_ptr())
    return out


def votes(path: str, packed: Tensor, weights: Tensor | None) -> Tensor:
    """Count bits: ``[n, bytes]`` to ``[8 * bytes]`` int32."""
    n, width = packed.shape
    out = torch.empty(8 * width, dtype=torch.int32)
    call("gq_votes", path, packed.data_ptr(), _pointer(weights), n, width, out.data_ptr())
    return out


def majority(path: str, packed: Tensor) -> Tensor:
    """Compute majority bits: ``[n, bytes]`` to ``[bytes]``."""
    n, width = packed.shape
    out = torch.empty(width, dtype=torch.uint8)
    call("gq_majority", path, packed.data_ptr(), n, width, out.data_ptr())
    return out


def sign_products(
    path: str, bits: Sequence[Tensor], scales: Sequence[Tensor], cols: int, group: int | None
) -> Tensor:
    """Compute inner products ``[n, n]`` float64 of ``n`` packed sign matrices with float32 scales."""
    n = len(bits)
    out = torch.empty(n, n, dtype=torch.float64)
    rows, factors = _pointers(bits), _pointers(scales)
    sizes = (n, bits[0].shape[0], cols, group or 0)
    call("gq_sign_products", path, features(), rows.ctypes.data, factors.ctypes.data, *sizes, out.data_ptr())
    return out


def signed_votes(path: str, bits: Sequence[Tensor], weights: Tensor, out: Tensor, unit: float) -> None:
    """Write the sums into ``out`` ``[rows, cols]`` int32 or, times ``unit``, float32."""
    packed = _pointers(bits)
    targets = (out.data_ptr(), None) if out.dtype == torch.int32 else (None, out.data_ptr())
    inputs = (packed.ctypes.data, weights.data_ptr())
    call("gq_signed_votes", path, *inputs, len(bits), *out.shape, unit, *targets)


def signed_trimmed(
    path: str, bits: Sequence[Tensor], mixing: Tensor, trim: int, unit: float, out: Tensor
) -> None:
    """Write ``unit`` times the trimmed sums of the mixed rows into ``out`` ``[rows, cols]`` float32."""
    packed = _pointers(bits)
    inputs = (packed.ctypes.data, mixing.data_ptr(), *mixing.shape)
    call("gq_signed_trimmed", path, *inputs, *out.shape, trim, unit, out.data_ptr())


def linear_pack(path: str, made: int, weight: Tensor, tiles: Tensor) -> None:
    """Pack ``weight`` (float32 or bfloat16) into ``tiles``; ``made`` is their header's address (``kernels.linear``)."""
    wide = int(weight.dtype == torch.float32)
    call("gq_linear_pack", path, made, wide, weight.data_ptr(), tiles.data_ptr())


def linear_decode(path: str, linear: int, start: int, stop: int, out: Tensor) -> None:
    """Decode rows of packed weights into ``out`` ``[stop - start, cols]`` float32."""
    call("gq_linear_decode", path, linear, start, stop, out.data_ptr())


def order(path: str, rule: int, updates: Tensor, weights: Tensor | None, amount: int, out: Tensor) -> None:
    """Reduce ``[n, d]`` float32 to ``out`` ``[d]`` with a sorting rule; ``amount`` is trimmed or kept."""
    n, d = updates.shape
    call("gq_order", path, rule, updates.data_ptr(), _pointer(weights), n, d, amount, out.data_ptr())


def combine(path: str, updates: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write the weighted sum of the rows ``[n, d]`` float32 into ``out`` ``[d]`` float32."""
    n, d = updates.shape
    call("gq_combine", path, updates.data_ptr(), weights.data_ptr(), n, d, out.data_ptr())


def combinations(path: str, updates: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Write ``matrix @ updates`` (``[m, n]`` float64 by ``[n, d]`` float32) into ``out`` ``[m, d]`` float32."""
    (n, d), m = updates.shape, len(matrix)
    call("gq_combinations", path, updates.data_ptr(), matrix.data_ptr(), n, d, m, out.data_ptr())


def products(path: str, updates: Tensor, out: Tensor) -> None:
    """Add the inner products of the rows ``[n, d]`` float32 to ``out`` ``[n, n]`` float64."""
    n, d = updates.shape
    call("gq_products", path, updates.data_ptr(), n, d, out.data_ptr())


def attend(
    path: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    spans: tuple[int, int],
    pool: Tensor,
    kind: int,
    sizes: tuple[int, int, int, int],
    scale: float,
    window: int,
) -> None:
    """Attend with ``tensors`` query, key, value and output ``[rows, heads, dim]``; ``spans``: address and number."""
    q, k, v, out = tensors
    inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0))
    target = (out.data_ptr(), out.stride(0))
    call("gq_attend", path, *inputs, *target, *spans, pool.data_ptr(), kind, *sizes, scale, window)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)


def call(name: str, path: str, *arguments: int | float | None) -> int:
    """Call a library function and return its status.

    Raises:
        MemoryError: If it could not allocate its workspace.
    """
    library = _load()[0]
    assert library is not None
    status = int(getattr(library, name)(CODES[path], torch.get_num_threads(), *arguments))
    if status == _NO_MEMORY:
        raise MemoryError(f"{name}: no memory for its workspace")
    return status
