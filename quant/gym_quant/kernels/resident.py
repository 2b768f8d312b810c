"""Sign deltas that stay in memory to be multiplied again and again: held once, checked once and not at every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native, reference
from gym_quant.kernels.matmul import MODES
from gym_quant.kernels.sign_matrix import SignMatrix
from gym_quant.kernels.signs import decode_signs
from gym_quant.resident import IndexArray, Resident, ResidentBatch

TILE = 64
_ROWS = 32
"""Rows at once: their tables of 4096 inputs are 2 MiB, which stays in a core's cache (256 rows at once took 2.6 times
as long as 8 times 32)."""
_SHIFTS = (0, 1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True, eq=False)
class ResidentSigns(Resident):
    """One layer of one variant, in the one layout that this machine multiplies with; no view of any file.

    Attributes:
        rows: ``out``.
        cols: ``in``.
        group_size: Inputs that share a scale; ``None`` for one scale a tensor or a row.
        tiled: Where native code reads it: bits ``[tiles, bytes, 64]``, scales ``[tiles, groups, 64]`` and the bytes of
            a row in a group.
        matrix: Elsewhere: on CUDA, without native code, and for groups that begin within a byte.
    """

    form: ClassVar[str] = "signs"

    rows: int
    cols: int
    group_size: int | None
    tiled: tuple[Tensor, Tensor, int] | None
    matrix: SignMatrix | None

    @classmethod
    def of(cls, matrix: SignMatrix, device: torch.device | None = None) -> ResidentSigns:
        """Copy a matrix, which may lie in a mapped file, into memory of its own."""
        on_cpu = device is None or device.type == "cpu"
        if on_cpu and matrix.whole_bytes and dispatch.path() != "torch":
            return cls(matrix.rows, matrix.cols, matrix.group_size, matrix.tiles(), None)
        target = device or torch.device("cpu")
        bits = matrix.bits.to(target, copy=True).contiguous()
        scales = matrix.scales.to(target, copy=True).contiguous()
        kept = SignMatrix(bits, scales, matrix.cols, matrix.group_size)
        return cls(matrix.rows, matrix.cols, matrix.group_size, None, kept)

    @cached_property
    def address(self) -> native.Address:
        """Addresses of the tiles, which must stay alive."""
        assert self.tiled is not None
        bits, scales, group = self.tiled
        return bits.data_ptr(), scales.data_ptr(), group

    @property
    def whole_bytes(self) -> bool:
        """Whether every group begins at a whole byte, which native code and look-up need."""
        return self.matrix is None or self.matrix.whole_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory of bits and scales."""
        if self.tiled is not None:
            return self.tiled[0].nbytes + self.tiled[1].nbytes
        assert self.matrix is not None
        return self.matrix.bits.nbytes + self.matrix.scales.nbytes

    def decode_rows(self, rows: Tensor) -> Tensor:
        """Rows by number (``[n] int64``, any order): ``[n, in]`` float32."""
        if self.tiled is not None:
            bits, scales, _ = self.tiled
            tile, lane = rows // TILE, rows % TILE
            return self._decoded(bits[tile, :, lane], scales[tile, :, lane])
        assert self.matrix is not None
        wide = self.matrix.scales.reshape(len(self.matrix.scales), -1).expand(self.rows, -1)
        return self._decoded(self.matrix.bits[rows], wide[rows])

    def decode_block(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` (a multiple of 64) to ``stop``: ``[stop - start, in]`` float32."""
        if self.tiled is not None:
            bits, scales, _ = self.tiled
            part = slice(start // TILE, -(-stop // TILE))
            count = stop - start
            flat = [t[part].transpose(1, 2).reshape(-1, t.shape[1])[:count] for t in (bits, scales)]
            return self._decoded(flat[0], flat[1])
        assert self.matrix is not None
        wide = self.matrix.scales.reshape(len(self.matrix.scales), -1).expand(self.rows, -1)
        return self._decoded(self.matrix.bits[start:stop], wide[start:stop])

    def largest(self) -> float:
        if self.tiled is not None:
            return float(self.tiled[1].max())
        assert self.matrix is not None
        return float(self.matrix.scales.max())

    def check_kernel(self, kernel: str) -> None:
        """Look-up reads whole bytes.

        Raises:
            CodecError: For groups that begin within a byte, with ``lookup``.
        """
        if kernel == "lookup" and not self.whole_bytes:
            raise CodecError(
                f"group_size {self.group_size} is no multiple of 8, as kernel lookup needs: serve with exact"
            )

    @classmethod
    def batch(cls, variants: Sequence[ResidentSigns], kernel: str) -> SignBatch:
        return SignBatch(variants, kernel)

    def _decoded(self, bits: Tensor, scales: Tensor) -> Tensor:
        """``[n, bytes]`` and ``[n, groups]`` to ``[n, in]``."""
        group = self.group_size or self.cols
        if bits.device.type == "cpu":
            return decode_signs(bits, scales.contiguous(), self.cols, group)
        shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=bits.device)
        ones = (bits[:, :, None] >> shifts).bitwise_and_(1).reshape(len(bits), -1)[:, : self.cols]
        signs = ones.to(torch.float32).mul_(2.0).sub_(1.0)
        return signs.mul_(reference.spread(scales, self.cols, self.group_size))


class SignBatch(ResidentBatch):
    """Variants of one layer side by side; ``add`` does what ``signed_matmul`` does, without its checks.

    Args:
        variants: The deltas, all ``[out, in]`` and on one device.
        mode: ``exact`` or ``lookup``.

    Raises:
        CodecError: For shapes that differ, an unknown mode, and groups that look-up cannot read.
    """

    def __init__(self, variants: Sequence[ResidentSigns], mode: str = "exact") -> None:
        if mode not in MODES:
            raise CodecError(f"mode is {mode!r}, not one of {', '.join(MODES)}")
        self.rows, self.cols = variants[0].rows, variants[0].cols
        tiled, self._elsewhere = [], False
        for number, variant in enumerate(variants):
            if variant.rows != self.rows or variant.cols != self.cols:
                raise CodecError(
                    f"variant {number} is {[variant.rows, variant.cols]}, not {[self.rows, self.cols]}"
                )
            if variant.tiled is not None:
                tiled.append(variant.address)
                continue
            self._elsewhere = True
            if mode == "lookup" and not variant.whole_bytes:
                raise CodecError(
                    f"variant {number}: group_size {variant.group_size} is no multiple of 8, as look-up needs"
                )
        self.variants = tuple(variants)
        self.kernel = self.mode = mode
        self._native = native.VariantPointers(tiled)
        if self._elsewhere:
            there = np.array([v.tiled is not None for v in variants])
            place = np.where(there, np.cumsum(there) - 1, -1)
            self._place: IndexArray = np.append(place, -1).astype(np.int64)  # the last one is for index -1

    def add(self, x: Tensor, index: IndexArray, y: Tensor, path: str | None = None) -> None:
        """``y[b] += scale * sign(delta[index[b]]) @ x[b]`` for every row with an index that is not -1.

        Args:
            x: ``[batch, in]`` float32, contiguous, on the variants' device.
            index: ``[batch]`` int64, contiguous, from -1 to the number of variants.
            y: ``[batch, out]`` float32, contiguous: changed in place.
            path: What ``dispatch.path()`` says, for callers that ask once for many calls.

        Raises:
            CodecError: In ``lookup`` for activations that are not finite.
        """
        path = path or dispatch.path()
        if self._elsewhere or path == "torch":
            self._add_elsewhere(x, index, y, path)
            if path == "torch" or not len(self._native):
                return
            index = self._place[index]
        for at in range(0, len(x), _ROWS):
            part = slice(at, at + _ROWS) if len(x) > _ROWS else slice(None)
            if not native.matmul_many(
                path, self.mode == "exact", x[part], y[part], self._native, index[part]
            ):
                raise CodecError("an activation is not finite: look-up cannot round it")

    def _add_elsewhere(self, x: Tensor, index: IndexArray, y: Tensor, path: str) -> None:
        """Rows whose variant native code cannot read."""
        elsewhere = [
            v if v >= 0 and (self.variants[v].tiled is None or path == "torch") else -1
            for v in index.tolist()
        ]
        if x.is_cuda:
            from gym_quant.kernels.triton_matmul import signed_matmul_cuda

            matrices = [v.matrix for v in self.variants if v.matrix is not None]
            signed_matmul_cuda(x, matrices, elsewhere, y, self.mode)
            return
        for variant, rows in reference.rows_by_variant(elsewhere).items():
            held, part, some = self.variants[variant], y[rows], x[rows]
            if self.mode == "exact":
                part += some @ held.decode_block(0, held.rows).T
            else:
                if not bool(torch.isfinite(some).all()):
                    raise CodecError("an activation is not finite: look-up cannot round it")
                bits, scales = _row_major(held)
                reference.lookup_matmul(some, part, bits, scales, held.group_size)
            y[rows] = part


def _row_major(held: ResidentSigns) -> tuple[Tensor, Tensor]:
    if held.matrix is not None:
        return held.matrix.bits, held.matrix.scales
    assert held.tiled is not None
    bits, scales = (t.transpose(1, 2).reshape(-1, t.shape[1])[: held.rows] for t in held.tiled[:2])
    return bits.contiguous(), scales.contiguous()
