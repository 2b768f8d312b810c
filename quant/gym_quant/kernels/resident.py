"""Sign deltas that are kept in memory for repeated products, and checked once instead of at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native_tiles, reference
from gym_quant.kernels.lookup import MODES, LookupTables
from gym_quant.kernels.program import Program
from gym_quant.kernels.sign_matrix import SignMatrix
from gym_quant.kernels.signs import decode_signs
from gym_quant.kernels.tiles import Tiled
from gym_quant.resident import IndexArray, Resident, ResidentBatch

_SHIFTS = (0, 1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True, eq=False)
class ResidentSigns(Resident):
    """A layer of a variant, in this machine's layout for products; never a view of a file.

    Attributes:
        rows: ``out``.
        cols: ``in``.
        group_size: Inputs that share a scale; ``None`` for one scale per tensor or row.
        tiled: Tiles for native code.
        matrix: Used instead of ``tiled`` on CUDA, without native code, or if groups begin within a byte.
    """

    form: ClassVar[str] = "signs"

    rows: int
    cols: int
    group_size: int | None
    tiled: Tiled | None
    matrix: SignMatrix | None

    @classmethod
    def of(cls, matrix: SignMatrix, device: torch.device | None = None) -> ResidentSigns:
        """Copy a matrix, which may be memory-mapped, into its own memory."""
        on_cpu = device is None or device.type == "cpu"
        if on_cpu and matrix.whole_bytes and dispatch.path() != "torch":
            return cls(matrix.rows, matrix.cols, matrix.group_size, matrix.tiles(), None)
        target = device or torch.device("cpu")
        bits = matrix.bits.to(target, copy=True).contiguous()
        scales = matrix.scales.to(target, copy=True).contiguous()
        signs = SignMatrix(bits, scales, matrix.cols, matrix.group_size)
        return cls(matrix.rows, matrix.cols, matrix.group_size, None, signs)

    @property
    def whole_bytes(self) -> bool:
        """True if every group begins at a whole byte, as native code and lookup require."""
        return self.matrix is None or self.matrix.whole_bytes

    @property
    def nbytes(self) -> int:
        """The size of the bits and the scales in bytes."""
        if self.tiled is not None:
            return self.tiled.nbytes
        assert self.matrix is not None
        return self.matrix.bits.nbytes + self.matrix.scales.nbytes

    def decode_rows(self, rows: Tensor) -> Tensor:
        """Decode rows by number (``[n]`` int64, any order): ``[n, in]`` float32."""
        if self.tiled is not None:
            return self.tiled.decode_rows(rows)
        assert self.matrix is not None
        wide = self.matrix.scales.reshape(len(self.matrix.scales), -1).expand(self.rows, -1)
        return self._decoded(self.matrix.bits[rows], wide[rows])

    def decode_block(self, start: int, stop: int) -> Tensor:
        """Decode rows ``start`` (a multiple of 64) to ``stop``: ``[stop - start, in]`` float32."""
        if self.tiled is not None:
            return self.tiled.decode_block(start, stop)
        assert self.matrix is not None
        wide = self.matrix.scales.reshape(len(self.matrix.scales), -1).expand(self.rows, -1)
        return self._decoded(self.matrix.bits[start:stop], wide[start:stop])

    def largest(self) -> float:
        if self.tiled is not None:
            return float(self.tiled.scales.max())
        assert self.matrix is not None
        return float(self.matrix.scales.max())

    def check_kernel(self, kernel: str) -> None:
        """Refuse lookup unless groups begin at whole bytes.

        Raises:
            CodecError: For groups that begin within a byte, with a kernel other than ``exact``.
        """
        if kernel != "exact" and not self.whole_bytes:
            raise CodecError(
                f"group_size {self.group_size} is not a multiple of 8, as kernel {kernel} needs: serve with exact"
            )

    @classmethod
    def batch(cls, variants: Sequence[ResidentSigns], kernel: str) -> SignBatch:
        return SignBatch(variants, kernel)

    def operands(self) -> reference.Operands:
        """Return the operands of the lookup reference."""
        if self.tiled is not None:
            return self.tiled.operands()
        assert self.matrix is not None
        return self.matrix.operands()

    def _decoded(self, bits: Tensor, scales: Tensor) -> Tensor:
        """Decode ``[n, bytes]`` and ``[n, groups]`` to ``[n, in]``."""
        group = self.group_size or self.cols
        if bits.device.type == "cpu":
            return decode_signs(bits, scales.contiguous(), self.cols, group)
        shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=bits.device)
        ones = (bits[:, :, None] >> shifts).bitwise_and_(1).reshape(len(bits), -1)[:, : self.cols]
        signs = ones.to(torch.float32).mul_(2.0).sub_(1.0)
        return signs.mul_(reference.spread(scales, self.cols, self.group_size))


class Multiplied(Protocol):
    """The interface that ``SignBatch`` accepts; ``ResidentSigns`` and planes of signs (``level_tiles``) have it."""

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...

    @property
    def tiled(self) -> Tiled | None: ...

    @property
    def matrix(self) -> SignMatrix | None: ...

    def check_kernel(self, kernel: str) -> None: ...

    def decode_rows(self, rows: Tensor) -> Tensor: ...

    def decode_block(self, start: int, stop: int) -> Tensor: ...

    def operands(self) -> reference.Operands: ...


class SignBatch(ResidentBatch):
    """A batch of variants of one layer; ``add`` is ``signed_matmul`` without its checks.

    Args:
        variants: The deltas, all ``[out, in]`` and on one device.
        mode: ``exact``, ``lookup`` or ``lookup16``.

    Attributes:
        native: True if native code multiplies all of them.

    Raises:
        CodecError: For shapes that differ, an unknown mode, and groups that lookup cannot read.
    """

    any_stride = True

    def __init__(self, variants: Sequence[Multiplied], mode: str = "exact") -> None:
        if mode not in MODES:
            raise CodecError(f"mode is {mode!r}, not one of {', '.join(MODES)}")
        self.rows, self.cols = variants[0].rows, variants[0].cols
        self._addresses: list[tuple[int, ...]] = []
        for number, variant in enumerate(variants):
            if (variant.rows, variant.cols) != (self.rows, self.cols):
                raise CodecError(
                    f"variant {number} is {[variant.rows, variant.cols]}, not {[self.rows, self.cols]}"
                )
            try:
                variant.check_kernel(mode)
            except CodecError as error:
                raise CodecError(f"variant {number}: {error}") from error
            if variant.tiled is not None:
                self._addresses.append(variant.tiled.address)
        self.variants = tuple(variants)
        self.kernel = self.mode = mode
        self.native = len(self._addresses) == len(variants)
        self._matrices: native_tiles.Matrices | None = None
        if self._addresses:
            place = None
            if not self.native:
                is_native = np.array([v.tiled is not None for v in variants])
                place = np.append(np.where(is_native, np.cumsum(is_native) - 1, -1), -1).astype(np.int64)
            self._matrices = native_tiles.Matrices(
                [native_tiles.Deltas(self.rows, self._addresses, 0, place)]
            )

    def tables(self, x: Tensor, index: IndexArray | None = None, path: str | None = None) -> object | None:
        """Build tables of ``x`` for ``add`` of any batch with the same mode and ``x``.

        Args:
            x: ``[batch, in]`` float32, contiguous.
            index: ``[batch]``; only rows whose index is not -1 get tables; None: all rows.
            path: As in ``add``.

        Returns:
            None if there is nothing to share: for ``exact``, and without native code.
        """
        path = path or dispatch.path()
        if self.mode == "exact" or path == "torch" or self._matrices is None:
            return None
        return LookupTables.of(x, self.mode, index, path)

    def add(
        self, x: Tensor, index: IndexArray, y: Tensor, path: str | None = None, tables: object | None = None
    ) -> None:
        """Compute ``y[b] += delta[index[b]] @ x[b]`` for every row with an index that is not -1.

        In lookup modes a row of ``x`` that is not finite makes its row of ``y`` NaN, and no other.

        Args:
            x: ``[batch, in]`` float32, contiguous, on the variants' device.
            index: ``[batch]`` int64, contiguous, from -1 to the number of variants.
            y: ``[batch, out]`` float32, changed in place; its columns are contiguous, its rows may be strided.
            path: Result of ``dispatch.path()``, for callers that make many calls.
            tables: The tables of ``x``, built by any batch with the same mode and input size.

        Raises:
            CodecError: For tables without a row that ``index`` names.
        """
        path = path or dispatch.path()
        if not self.native or path == "torch":
            self._add_elsewhere(x, index, y, path)
        if self._matrices is None or path == "torch":
            return
        if self.mode == "exact":
            native_tiles.add_exactly(path, x, index, y, self._matrices)
        elif isinstance(tables, LookupTables):
            tables.add(path, x, index, y, self._matrices)
        else:
            native_tiles.add_by_lookup(path, self.mode == "lookup16", x, index, y, self._matrices, None)

    def add_rows(self, index: IndexArray, rows: Tensor, out: Tensor) -> None:
        """Add embedding rows of any variants in one call: ``out[b] += delta[index[b]][rows[b]]``.

        Args:
            index: ``[n]`` int64, contiguous, from -1 to the number of variants.
            rows: ``[n]`` int64.
            out: ``[n, in]`` float32, changed in place.
        """
        if self.native and dispatch.path() != "torch":
            row_numbers, deltas = rows.contiguous().numpy(), native_tiles.Deltas(self.rows, self._addresses)
            native_tiles.decode_tiles(dispatch.path(), deltas, index, row_numbers, out, True)
            return
        for variant, places in reference.rows_by_variant(index.tolist()).items():
            out[places] += self.variants[variant].decode_rows(rows[places])

    def deltas(self, column: int, place: IndexArray | None) -> native_tiles.Deltas:
        """Return this batch as a part of ``BoundTerms``, which keeps it alive."""
        return native_tiles.Deltas(self.rows, self._addresses, column, place)

    def _add_elsewhere(self, x: Tensor, index: IndexArray, y: Tensor, path: str) -> None:
        """Add the rows whose variant native code cannot read."""
        fallback = [
            v if v >= 0 and (self.variants[v].tiled is None or path == "torch") else -1
            for v in index.tolist()
        ]
        if x.is_cuda:
            from gym_quant.kernels.triton_matmul import signed_matmul_cuda

            matrices = [v.matrix for v in self.variants if v.matrix is not None]
            signed_matmul_cuda(x, matrices, fallback, y, self.mode)
            return
        for variant, rows in reference.rows_by_variant(fallback).items():
            held, part, some = self.variants[variant], y[rows], x[rows]
            if self.mode == "exact":
                part += some @ held.decode_block(0, held.rows).T
            else:
                reference.lookup_matmul(some, part, held.operands(), self.mode == "lookup16")
            y[rows] = part


class BoundTerms:
    """The terms of several batches that share an input (query, key and value), added by one native call.

    Args:
        batches: Batches of the same mode and input size, all ``native``; kept alive.
        columns: The first column of each in the shared ``y``.
        places: For each batch, ``[variants + 1]`` int64 that maps the step's variant numbers to the batch's (-1: none);
            None if they are equal.

    Raises:
        CodecError: For batches that cannot be combined.
    """

    def __init__(
        self,
        batches: Sequence[SignBatch],
        columns: Sequence[int],
        places: Sequence[IndexArray | None] | None = None,
    ) -> None:
        kinds = {(batch.mode, batch.cols, batch.native) for batch in batches}
        if len(kinds) != 1 or not batches[0].native:
            raise CodecError(
                f"batches with different modes, inputs or native code cannot be combined: {sorted(kinds)}"
            )
        self._batches = tuple(batches)
        parts = zip(batches, columns, places or [None] * len(batches), strict=True)
        self._matrices = native_tiles.Matrices(
            [batch.deltas(column, place) for batch, column, place in parts]
        )

    def bind(self, path: str) -> Callable[[int, int, int, int, int], None]:
        """Bind the call, so that a layer of a step takes few Python instructions.

        Args:
            path: A native path, from ``dispatch.path()``.

        Returns:
            ``add(x, batch, index, y, stride)``: the addresses of ``x`` ``[batch, in]`` float32 and ``index``
            ``[batch]`` int64, both contiguous, and of ``y``, whose float32 rows are ``stride`` apart. The caller keeps
            them and this object alive.
        """
        batch = self._batches[0]
        return native_tiles.bound_add(path, batch.mode, batch.cols, self._matrices)

    def record(self, program: Program, x: Tensor, y: Tensor) -> bool:
        """Add the terms of the rows' ``owners`` to a program; this object must outlive it.

        Returns:
            True if they were added; False for ``exact``.
        """
        mode = self._batches[0].mode
        if mode == "exact":
            return False
        program.add_by_lookup(mode == "lookup16", x, y, self._matrices.arguments)
        return True
