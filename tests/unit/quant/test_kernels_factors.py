"""Rows get the terms of their own variant's factors, to the same bits alone and beside others, on every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import dispatch, native
from gym_quant.kernels.factors import FactorMatrix, FactorTerms

NATIVE = [path for path in dispatch.available() if path != "torch"]
VARIANTS, GAP = 4, 3
Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]


def pairs(cols: int, rows: int, ranks: dict[int, int], dtype: torch.dtype, seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {variant: (normal(rank, cols), normal(rank, rows)) for variant, rank in ranks.items()}


def matrices(cols: int, dtype: torch.dtype) -> list[FactorMatrix]:
    """Side by side with columns between them; variant 3 changes none, and ranks go beyond a block of 64."""
    first = pairs(cols, 37, {0: 5, 1: 16, 2: 70}, dtype, 0)
    second = pairs(cols, 160, {0: 8, 2: 1}, dtype, 1)
    return [FactorMatrix(37, 0, first), FactorMatrix(160, 37 + GAP, second)]


def case(rows: int, cols: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, cols, generator=generator)
    index = torch.randint(-1, VARIANTS, (rows,), generator=generator).numpy()
    return x, index, torch.randn(rows, 37 + GAP + 160, generator=generator)


@pytest.mark.parametrize("path", dispatch.available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (9, 50), (150, 7)])
def test_terms_are_the_products_with_both_factors(
    path: str, dtype: torch.dtype, rows: int, cols: int
) -> None:
    held, (x, index, y) = matrices(cols, dtype), case(rows, cols)
    index[0] = 2
    wanted, sizes = y.double(), torch.zeros_like(y, dtype=torch.float64)
    for row, variant in enumerate(index.tolist()):
        for matrix in held:
            if variant in matrix.pairs:
                part = slice(matrix.column, matrix.column + matrix.rows)
                a, b = (factor.double() for factor in matrix.pairs[variant])
                wanted[row, part] += x[row].double() @ a.T @ b
                sizes[row, part] += x[row].double().abs() @ a.T.abs() @ b.abs()
    found = y.clone()
    with kernels.using(path):
        FactorTerms(held, VARIANTS, cols).add(x, index, found)
    assert bool(((found - wanted).abs() <= 2e-6 * (sizes + wanted.abs())).all())
    untouched = sizes == 0
    assert bool(untouched.any())
    assert torch.equal(found[untouched], y[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_alone_and_beside_others_on_every_path_with_any_threads(dtype: torch.dtype) -> None:
    cols, rows = 330, 150
    terms, (x, index, y) = FactorTerms(matrices(cols, dtype), VARIANTS, cols), case(rows, cols)
    assert NATIVE or native.absence()
    seen = []
    threads = torch.get_num_threads()
    try:
        for path in NATIVE:
            for count in (1, 3):
                torch.set_num_threads(count)
                seen.append(y.clone())
                with kernels.using(path):
                    terms.add(x, index, seen[-1])
            for row in (0, 77, 149):
                alone = y[row : row + 1].clone()
                with kernels.using(path):
                    terms.add(x[row : row + 1], index[row : row + 1], alone)
                assert torch.equal(alone[0], seen[-1][row])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("path", dispatch.available())
def test_numbers_that_are_not_finite_stay_in_their_row(path: str) -> None:
    cols = 40
    terms, (x, _, y) = FactorTerms(matrices(cols, torch.float32), VARIANTS, cols), case(6, cols)
    index = np.array([0, 0, 1, 1, 2, -1], dtype=np.int64)
    with kernels.using(path):
        wanted, found = y.clone(), y.clone()
        terms.add(x, index, wanted)
        x[1, 3] = float("inf")
        terms.add(x, index, found)
    others = [0, 2, 3, 4, 5]
    assert torch.allclose(found[others], wanted[others], rtol=0, atol=1e-5)
    assert not bool(found[1].isfinite().all())


def test_factors_that_do_not_go_together_are_refused() -> None:
    whole = pairs(8, 6, {0: 2}, torch.float32, 0)
    a, b = whole[0]
    for broken in (
        {0: (a, b.to(torch.bfloat16))},
        {0: (a.half(), b.half())},
        {0: (a, torch.randn(6, 2).T)},
        {0: (a, b[:1])},
        {0: (a[:, :7].contiguous(), b)},
        {0: (a, b[:, :5].contiguous())},
        {1: (a, b)},
    ):
        with pytest.raises(CodecError):
            FactorTerms([FactorMatrix(6, 0, broken)], 1, 8)
    FactorTerms([FactorMatrix(6, 0, whole)], 1, 8)


WRONG: dict[str, Any] = {
    "x of every other column": (lambda x, index, y: (x.repeat(1, 2)[:, ::2], index, y), "x is .* in strides of"),
    "x of doubles": (lambda x, index, y: (x.double(), index, y), "x is torch.float64"),
    "narrow x": (lambda x, index, y: (x[:, :39].contiguous(), index, y), r"x is \[6, 39\]"),
    "narrow y": (lambda x, index, y: (x, index, y[:, :199]), r"y \[6, 199\], not \[6, 40\] and \[6, 200\]"),
    "fewer rows of y": (lambda x, index, y: (x, index, y[:5]), r"y \[5, 200\]"),
    "y by columns": (lambda x, index, y: (x, index, y.T.contiguous().T), "y is .* in strides of"),
    "y of halves": (lambda x, index, y: (x, index, y.half()), "y is torch.float16"),
    "a variant too many": (lambda x, index, y: (x, index + VARIANTS, y), "not from -1 to 3"),
    "below -1": (lambda x, index, y: (x, index - 4, y), "not from -1 to 3"),
    "narrow numbers": (lambda x, index, y: (x, index.astype(np.int32), y), "index is .* int32"),
    "every other number": (lambda x, index, y: (x, index.repeat(2)[::2], y), "index is"),
    "fewer numbers": (lambda x, index, y: (x, index[:5], y), r"index is \[5\]"),
}  # fmt: skip


@pytest.mark.parametrize("path", dispatch.available())
@pytest.mark.parametrize("name", WRONG)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_written(path: str, name: str) -> None:
    change, words = WRONG[name]
    terms, (x, index, y) = FactorTerms(matrices(40, torch.float32), VARIANTS, 40), case(6, 40)
    index[0] = 2
    x, index, y = change(x, index, y)
    before = y.clone()
    with kernels.using(path), pytest.raises(CodecError, match=words):
        terms.add(x, index, y)
    assert torch.equal(y, before)


def test_a_column_before_the_first_is_refused() -> None:
    with pytest.raises(CodecError, match=r"columns of y begin at \[-1\]"):
        FactorTerms([FactorMatrix(6, -1, pairs(8, 6, {0: 2}, torch.float32, 0))], 1, 8)
