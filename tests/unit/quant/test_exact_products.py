"""Matrix products from slices: as exact as float64 sums, and the same bits in any order of addition."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from gym_quant import CodecError
from gym_quant.exact import RightFactor, Sliced, gram, products
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

SMALLEST = 2.0**-200
NUMBERS = (st.floats(-(2.0**60), 2.0**60) | st.floats(-1.0, 1.0)).map(
    lambda x: x if abs(x) > SMALLEST else 0.0
)


def matrix(rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def in_fractions(left: torch.Tensor, right: torch.Tensor) -> list[list[Fraction]]:
    """``left @ right.T`` without any rounding."""
    rows = [[Fraction(x) for x in row] for row in left.double().tolist()]
    others = [[Fraction(x) for x in row] for row in right.double().tolist()]
    return [[sum((x * y for x, y in zip(a, b, strict=True)), Fraction()) for b in others] for a in rows]


@given(hnp.arrays("float64", (4, 5), elements=NUMBERS), hnp.arrays("float64", (3, 5), elements=NUMBERS))
@settings(max_examples=50)
def test_products_are_off_by_no_more_than_float64_sums_are(left: object, right: object) -> None:
    a, b = torch.as_tensor(left), torch.as_tensor(right)
    found = products(Sliced.of(a), Sliced.of(b))
    for i, row in enumerate(in_fractions(a, b)):
        for j, exact in enumerate(row):
            room = Fraction(float(a[i].abs().max())) * Fraction(float(b[j].abs().max())) * 5
            assert abs(Fraction(float(found[i, j])) - exact) <= room / 2**52


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 3, 1000, 4097])
def test_products_of_half_precision_numbers_are_exact(width: int, dtype: torch.dtype) -> None:
    left, right = matrix(3, width, 0).to(dtype), matrix(2, width, 1).to(dtype)
    found = products(Sliced.of(left), Sliced.of(right))
    assert found.tolist() == [[float(exact) for exact in row] for row in in_fractions(left, right)]


@pytest.mark.parametrize("most", [2, 3])
def test_no_bit_depends_on_threads_blocks_or_the_order_of_the_sum(most: int) -> None:
    left, right = matrix(48, 1000), matrix(40, 1000, 1)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            whole, other = Sliced.of(left, most), Sliced.of(right, most)
            found.append(products(whole, other))
            blocks = [whole.rows(at, at + 8 * threads) for at in range(0, 48, 8 * threads)]
            found.append(torch.cat([products(block, other) for block in blocks]))
            rows = [products(Sliced.of(row[None], most), other) for row in left[:: 4 - threads]]
            assert torch.equal(torch.cat(rows), found[0][:: 4 - threads])
            found.append(products(Sliced.of(left[:, order], most), Sliced.of(right[:, order], most)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_gram_matrix_is_symmetric_to_the_bit_and_that_of_any_two_matrices() -> None:
    rows = matrix(30, 500) * torch.logspace(-8, 8, 30, dtype=torch.float64)[:, None]
    found = gram(rows)
    assert torch.equal(found, found.T)
    assert torch.equal(found, products(Sliced.of(rows), Sliced.of(rows.clone())))
    torch.testing.assert_close(found, rows @ rows.T, rtol=1e-12, atol=0)


def test_zeros_have_no_sign_and_a_width_of_nothing_is_zero() -> None:
    found = products(Sliced.of(torch.zeros(2, 3)), Sliced.of(-matrix(2, 3).abs()))
    assert not bool(torch.signbit(found).any())
    assert torch.equal(gram(torch.zeros(2, 0)), torch.zeros(2, 2, dtype=torch.float64))


def test_the_matrix_stays_as_it_was() -> None:
    rows = matrix(3, 4)
    before = rows.clone()
    gram(rows)
    RightFactor.of(rows)
    assert torch.equal(rows, before)


def test_numbers_out_of_range_are_refused() -> None:
    assert bool(torch.isfinite(gram(torch.full((1, 2), 2.0**479, dtype=torch.float64))).all())
    with pytest.raises(CodecError, match=r"magnitude 1e\+200 is too large"):
        gram(torch.full((1, 2), 1e200, dtype=torch.float64))


@pytest.mark.parametrize("spread", [0, 20, 60])
def test_components_that_differ_in_opposite_ways_lose_no_bits_of_float32(spread: int) -> None:
    scale = torch.from_numpy(np.logspace(-spread / 2, spread / 2, 16))
    a, b = matrix(16, 40) * scale[:, None], matrix(30, 16, 1) / scale
    found = RightFactor.of(a).after(b)
    wanted = (b * scale) @ (a / scale[:, None])
    assert float((found - wanted).norm() / wanted.norm()) < 1e-11
