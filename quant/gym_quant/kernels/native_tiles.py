"""ctypes bindings that multiply and decode deltas in tiles (``kernels.tiles``).

As in ``native``, callers check shapes and dtypes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gym_quant.kernels import native

Index = np.ndarray[Any, np.dtype[np.int64]]


def tile(bits: Tensor) -> Tensor:
    """Tile ``[planes, rows, bytes]`` to ``[ceil(rows / 64), ceil(bytes / 4), planes, 64, 4]``."""
    planes, rows, width = bits.shape
    out = torch.empty(-(-rows // 64), -(-width // 4), planes, 64, 4, dtype=torch.uint8)
    library = native.library()
    if library.gq_tile(torch.get_num_threads(), bits.data_ptr(), planes, rows, width, out.data_ptr()):
        raise MemoryError("gq_tile")
    return out


class Deltas:
    """The deltas of a matrix as addresses for the library; the holder keeps their tensors alive.

    Args:
        rows: Number of outputs.
        deltas: For each, the addresses of tiles, scales and offsets (0: none), then the bytes of a group, the number of
            planes, ``zero`` (times the sum of the inputs), and the planes' shifts, 4 bits each.
        column: The column of ``y`` at which the outputs begin.
        place: ``[variants + 1]`` int64: a map from variant numbers in the step to those here (-1: none); None if equal.
    """

    def __init__(
        self,
        rows: int,
        deltas: Sequence[Sequence[int]],
        column: int = 0,
        place: np.ndarray[Any, Any] | None = None,
    ) -> None:
        # an array, since numpy takes three times as long to create one and return its address
        columns = tuple(zip(*(delta[:3] for delta in deltas), strict=True))
        self._addresses = array("Q", chain.from_iterable(columns))
        self._numbers = array("q", chain.from_iterable(delta[3:] for delta in deltas))
        self._place = place
        start, step = self._addresses.buffer_info()[0], 8 * len(deltas)
        self.words = (
            rows,
            column,
            0 if place is None else place.ctypes.data,
            *(start, start + step, start + 2 * step),
            self._numbers.buffer_info()[0],
        )

    def __len__(self) -> int:
        return len(self._numbers) // 4


class Matrices:
    """Matrices that one call multiplies with the same input, side by side in ``y``."""

    def __init__(self, matrices: Sequence[Deltas]) -> None:
        self._kept = tuple(matrices)
        self._words = array("q", chain.from_iterable(deltas.words for deltas in matrices))
        self.arguments = (len(matrices), self._words.buffer_info()[0])
        """The number of matrices, and the address of their descriptors."""


def add_exactly(path: str, x: Tensor, index: Index, y: Tensor, matrices: Matrices) -> None:
    """Compute ``y[b] += delta @ x[b]`` in float32; ``y`` ``[batch, columns]`` may have any row stride."""
    batch, cols = x.shape
    target = (index.ctypes.data, y.data_ptr(), y.stride(0))
    native.call("gq_exact_add", path, x.data_ptr(), batch, cols, *target, *matrices.arguments)


def lookup_tables(path: str, wide: bool, x: Tensor, index: Index | None) -> tuple[Tensor, Tensor, Tensor]:
    """Build the lookup tables of inputs.

    Returns:
        Codes, steps, and a state per row: 0 if an input or a sum of four is not finite, 1 if built, 2 if absent.
    """
    batch, cols = x.shape
    codes = torch.empty(batch, -(-cols // 32), 256 if wide else 128, dtype=torch.uint8)
    steps = torch.empty(batch, -(-cols // 1024))
    states = torch.empty(batch, dtype=torch.uint8)
    chosen = None if index is None else index.ctypes.data
    made = (codes.data_ptr(), steps.data_ptr(), states.data_ptr())
    native.call("gq_lookup_tables", path, int(wide), x.data_ptr(), batch, cols, chosen, *made)
    return codes, steps, states


def add_by_lookup(
    path: str,
    wide: bool,
    x: Tensor,
    index: Index,
    y: Tensor,
    matrices: Matrices,
    tables: tuple[Tensor, Tensor, Tensor] | None,
) -> bool:
    """Multiply with lookup tables of 8 or, if ``wide``, 16 bits: the given ones, or tables built for this call.

    Returns:
        False if the tables lack a row that ``index`` requires; ``y`` is then unchanged.
    """
    batch, cols = x.shape
    given = (None, None, None) if tables is None else tuple(t.data_ptr() for t in tables)
    inputs = (native.features(), int(wide), x.data_ptr(), *given, batch, cols)
    target = (index.ctypes.data, y.data_ptr(), y.stride(0))
    return native.call("gq_lookup_add", path, *inputs, *target, *matrices.arguments) != native.NOT_MADE


def bound_add(path: str, mode: str, cols: int, matrices: Matrices) -> Callable[..., None]:
    """Bind all arguments of ``add_exactly`` or ``add_by_lookup`` that do not change between steps.

    Args:
        path: A native path.
        mode: ``exact``, ``lookup`` or ``lookup16``.
        cols: Number of inputs.
        matrices: Kept alive by the caller.

    Returns:
        ``add(x, batch, index, y, stride)``, given addresses; ``x`` ``[batch, cols]`` and ``index`` ``[batch]`` must be
        contiguous.
    """
    library = native.library()
    code, threads, rest = native.CODES[path], torch.get_num_threads(), matrices.arguments
    if mode == "exact":
        exact = library.gq_exact_add

        def add(x: int, batch: int, index: int, y: int, stride: int) -> None:
            if exact(code, threads, x, batch, cols, index, y, stride, *rest):
                raise MemoryError("gq_exact_add: no memory for its workspace")

        return add
    lookup, features, wide = library.gq_lookup_add, native.features(), int(mode == "lookup16")

    def add_by_tables(x: int, batch: int, index: int, y: int, stride: int) -> None:
        if lookup(code, threads, features, wide, x, None, None, None, batch, cols, index, y, stride, *rest):
            raise MemoryError("gq_lookup_add: no memory for its workspace")

    return add_by_tables


def decode_tiles(path: str, deltas: Deltas, index: Index, rows: Index, out: Tensor, add: bool) -> None:
    """Write (or add) one row of a variant into each row of ``out`` ``[n, cols]`` float32, of any row stride."""
    words = array("q", deltas.words)
    places = (index.ctypes.data, rows.ctypes.data, len(rows), int(add))
    where = (words.buffer_info()[0], out.shape[1])
    native.call("gq_decode_tiles", path, *where, *places, out.data_ptr(), out.stride(0))
