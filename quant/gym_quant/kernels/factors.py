"""Low-rank deltas of a batch: multiply every row by its variant's factors, for matrices that share an input.

    terms = FactorTerms([FactorMatrix(rows, column, {0: (a, b)})], variants=1, cols=576)
    terms.add(x, index, y)                         # y[n, column:] += (x[n] @ a.T) @ b where index[n] is 0

Native paths agree to the last bit, and a row's result does not depend on the rest of the batch. Sums are float32 for
any dtype of the factors. Native code and torch reference differ by less than 2e-6 of the sums of absolute products
(tested).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gym_quant.errors import CodecError
from gym_quant.kernels import dispatch, native, reference
from gym_quant.kernels.program import Program
from gym_quant.resident import IndexArray


@dataclass(frozen=True, eq=False)
class FactorMatrix:
    """The factors of one matrix.

    Attributes:
        rows: ``out``.
        column: The matrix's first column in ``y``.
        pairs: By variant, ``a`` ``[rank, in]`` and ``b`` ``[rank, out]``: contiguous, on the CPU, all float32 or all
            bfloat16; variants that do not change the matrix are absent.
    """

    rows: int
    column: int
    pairs: Mapping[int, tuple[Tensor, Tensor]]


class FactorTerms:
    """The terms of matrices that share an input (query, key and value), added by one native call.

    Args:
        matrices: All of one dtype; kept alive.
        variants: Number of variants.
        cols: ``in``.

    Raises:
        CodecError: For factors that cannot be combined.
    """

    def __init__(self, matrices: Sequence[FactorMatrix], variants: int, cols: int) -> None:
        tensors = [factor for matrix in matrices for pair in matrix.pairs.values() for factor in pair]
        dtypes = {factor.dtype for factor in tensors}
        if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
            raise CodecError(f"factors are in {sorted(map(str, dtypes))}, not in one of float32 and bfloat16")
        if not all(factor.is_contiguous() and factor.is_cpu for factor in tensors):
            raise CodecError("a factor is not contiguous on the CPU")
        for matrix in matrices:
            for variant, (a, b) in matrix.pairs.items():
                if not 0 <= variant < variants or a.shape != (len(b), cols) or b.shape[1:] != (matrix.rows,):
                    raise CodecError(
                        f"variant {variant} of {variants} has {list(a.shape)} and {list(b.shape)}, not "
                        f"[rank, {cols}] and [rank, {matrix.rows}]"
                    )
        if any(matrix.column < 0 for matrix in matrices):
            raise CodecError(f"columns of y begin at {[matrix.column for matrix in matrices]}")
        self._matrices, self._cols, self._variants = tuple(matrices), cols, variants
        self._wide = int(dtypes == {torch.float32})
        self._lists = [_lists(matrix, variants) for matrix in matrices]
        starts = [[held.buffer_info()[0] for held in lists] for lists in self._lists]
        words = [[m.rows, m.column, *start] for m, start in zip(matrices, starts, strict=True)]
        self._words = array("q", chain.from_iterable(words))

    def add(self, x: Tensor, index: IndexArray, y: Tensor) -> None:
        """Add the terms of all rows whose variant is not -1.

        Args:
            x: ``[batch, in]`` float32, contiguous.
            index: Each row's variant, or -1: ``[batch]`` int64, contiguous.
            y: ``[batch, columns]`` float32; its rows may be strided.

        Raises:
            CodecError: For other shapes, dtypes, devices and strides, and for unknown variants.
        """
        self._check(x, index, y)
        path = dispatch.path()
        if path != "torch":
            self.bind(path)(x.data_ptr(), len(x), index.ctypes.data, y.data_ptr(), y.stride(0))
            return
        for variant, rows in reference.rows_by_variant(index.tolist()).items():
            for matrix in self._matrices:
                if variant in matrix.pairs:
                    a, b = (factor.to(torch.float32) for factor in matrix.pairs[variant])
                    y[rows, matrix.column : matrix.column + matrix.rows] += (x[rows] @ a.T) @ b

    def _check(self, x: Tensor, index: IndexArray, y: Tensor) -> None:
        n = len(x)
        width = max(matrix.column + matrix.rows for matrix in self._matrices)
        if x.shape != (n, self._cols) or y.ndim != 2 or len(y) != n or y.shape[1] < width:
            raise CodecError(
                f"x is {list(x.shape)} and y {list(y.shape)}, not [{n}, {self._cols}] and [{n}, {width}] or wider"
            )
        for name, tensor, fits in (("x", x, x.is_contiguous()), ("y", y, y.stride(1) == 1)):
            if tensor.dtype != torch.float32 or not tensor.is_cpu or not fits:
                raise CodecError(
                    f"{name} is {tensor.dtype} on {tensor.device} in strides of {tensor.stride()}"
                )
        if index.shape != (n,) or index.dtype != np.int64 or not index.flags.c_contiguous:
            raise CodecError(f"index is {list(index.shape)} {index.dtype}, not [{n}] int64, contiguous")
        if n and not -1 <= int(index.min()) <= int(index.max()) < self._variants:
            raise CodecError(
                f"index is from {index.min()} to {index.max()}, not from -1 to {self._variants - 1}"
            )

    def bind(self, path: str) -> Callable[[int, int, int, int, int], None]:
        """Return the native call, as ``BoundTerms.bind`` does; this object must stay alive."""
        run = native.library().gq_factors_add
        code, threads, wide, cols = native.CODES[path], torch.get_num_threads(), self._wide, self._cols
        rest = (len(self._matrices), self._words.buffer_info()[0])

        def add(x: int, batch: int, index: int, y: int, stride: int) -> None:
            if run(code, threads, wide, x, batch, cols, index, y, stride, *rest):
                raise MemoryError("gq_factors_add: no memory for its workspace")

        return add

    def record(self, program: Program, x: Tensor, y: Tensor) -> None:
        """Add the terms of the rows' ``owners`` to a program; this object must outlive it."""
        program.add_factors(bool(self._wide), x, y, (len(self._matrices), self._words.buffer_info()[0]))


def _lists(matrix: FactorMatrix, variants: int) -> tuple[array[int], array[int], array[int]]:
    """Return the addresses of ``a`` and ``b`` and the rank, by variant; 0 if absent."""
    pairs = [matrix.pairs.get(variant) for variant in range(variants)]
    a = array("Q", [0 if pair is None else pair[0].data_ptr() for pair in pairs])
    b = array("Q", [0 if pair is None else pair[1].data_ptr() for pair in pairs])
    return a, b, array("q", [0 if pair is None else len(pair[0]) for pair in pairs])
