"""Kernels that sort, combine and multiply updates: every path to the last bit, against numpy and brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

PATHS = kernels.available()
NATIVE = [name for name in PATHS if name != "torch"]
WIDTHS = (1, 7, 172, 1000)


def updates_of(n: int, d: int, seed: int = 0, ties: bool = False) -> Tensor:
    """Normal values of many sizes; with ties, few different ones, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, d, generator=generator)
    if not ties:
        return values * torch.logspace(-3, 3, d)
    rounded = values.round()
    return torch.where(torch.rand(n, d, generator=generator) < 0.5, rounded, -rounded)


def weights_of(n: int) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) + 0.1


def rules(n: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every function from ``[n, d]`` to ``[d]``, at several amounts."""
    weights, trims = weights_of(n), {0, n // 5, (n - 1) // 2}
    made: dict[str, Callable[[Tensor], Tensor]] = {
        "median": kernels.median,
        "combination": lambda x: kernels.linear_combination(x, weights),
    }
    for trim in trims:
        made[f"trim {trim}"] = lambda x, trim=trim: kernels.trimmed_mean(x, trim)
        made[f"weighted {trim}"] = lambda x, trim=trim: kernels.weighted_trimmed_mean(x, weights, trim)
    for keep in {1, n // 2 + 1, n}:
        made[f"keep {keep}"] = lambda x, keep=keep: kernels.mean_around_median(x, keep)
    return made


def results(x: Tensor, path: str) -> dict[str, np.ndarray]:
    with kernels.using(path):
        return {name: rule(x).numpy().view(np.int32) for name, rule in rules(len(x)).items()}


@pytest.mark.few(19, "numbers up to 70")
@pytest.mark.parametrize("n", [*range(1, 71), 130])
def test_every_path_gives_the_same_bits_for_any_number_of_contributors(n: int) -> None:
    for d, ties in ((WIDTHS[n % 4], False), (WIDTHS[(n + 1) % 3], True)):
        x = updates_of(n, d, n, ties)
        expected = results(x, "torch")
        for path in NATIVE:
            found = results(x, path)
            assert all(np.array_equal(found[name], expected[name]) for name in expected), path


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("n", "d"), [(1, 5), (4, 1000), (10, 172), (33, 7), (64, 49), (130, 1000), (700, 33)]
)
def test_results_are_those_of_float64(path: str, n: int, d: int) -> None:
    x, weights, trim = updates_of(n, d), weights_of(n), n // 5
    wide, heavy = x.double().numpy(), weights.numpy()
    rows, order = np.sort(wide, axis=0), np.argsort(wide, axis=0, kind="stable")
    kept, held = rows[trim : n - trim], heavy[order][trim : n - trim]
    with kernels.using(path):
        close(kernels.trimmed_mean(x, trim), kept.mean(axis=0), x)
        close(kernels.weighted_trimmed_mean(x, weights, trim), (kept * held).sum(0) / held.sum(0), x)
        close(kernels.median(x), np.median(wide, axis=0), x)
        close(kernels.linear_combination(x, weights), heavy @ wide, x * n)


def close(found: Tensor, expected: np.ndarray, x: Tensor) -> None:
    assert found.dtype == torch.float32
    room = 1e-7 * x.abs().amax(dim=0).double().numpy()
    assert (np.abs(found.double().numpy() - expected) <= room).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9])
def test_the_mean_around_the_median_takes_the_nearest_and_of_two_as_near_the_smaller(
    path: str, n: int
) -> None:
    x = updates_of(n, 172, n, ties=True)
    for keep in range(1, n + 1):
        with kernels.using(path):
            found = kernels.mean_around_median(x, keep)
        for c in range(x.shape[1]):
            values = sorted(x[:, c].double().tolist())
            middle = float(np.median(values))
            nearest = sorted(values, key=lambda value: (abs(value - middle), value))[:keep]
            assert found[c] == np.float32(sum(sorted(nearest)) / keep)


@pytest.mark.parametrize("path", PATHS)
def test_the_window_is_nearest_among_all_choices_of_values(path: str) -> None:
    x = updates_of(7, 33, 5)
    with kernels.using(path):
        found = kernels.mean_around_median(x, 4).double()
    for c in range(x.shape[1]):
        values = x[:, c].double().tolist()
        middle = float(np.median(values))
        best = min(combinations(values, 4), key=lambda some: sorted(abs(v - middle) for v in some)[::-1])
        assert found[c] == pytest.approx(sum(best) / 4, rel=1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_the_order_of_contributors_changes_no_bit_of_a_sorted_rule(path: str) -> None:
    x = updates_of(37, 172, 1, ties=True) + updates_of(37, 172, 2)
    other = x[torch.randperm(37, generator=torch.Generator().manual_seed(3))].contiguous()
    with kernels.using(path):
        assert torch.equal(kernels.trimmed_mean(x, 5), kernels.trimmed_mean(other, 5))
        assert torch.equal(kernels.median(x), kernels.median(other))
        assert torch.equal(kernels.mean_around_median(x, 20), kernels.mean_around_median(other, 20))


@pytest.mark.parametrize("path", PATHS)
def test_equal_values_rank_by_row_and_minus_zero_is_zero(path: str) -> None:
    x = torch.tensor([[0.0, 2.0], [-0.0, 2.0], [0.0, 2.0], [5.0, 2.0]])
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    with kernels.using(path):
        for n in (1, 2, 3):
            minus = torch.full((n, 3), -0.0)
            for result in (
                kernels.median(minus),
                kernels.trimmed_mean(minus, 0),
                kernels.mean_around_median(minus, 1),
            ):
                assert not torch.signbit(result).any()
        # Ranks 1 and 2 are rows 1 and 2 in both columns, whatever the sign of zero.
        found = kernels.weighted_trimmed_mean(x + torch.tensor([1.0, 0.0]), weights, 1)
        assert found.tolist() == [1.0, 2.0]
        tied = torch.tensor([[0.0], [-0.0], [1.0]])
        assert (
            kernels.weighted_trimmed_mean(tied, torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), 0)
            == 5 / 8
        )
        spread = torch.tensor([[1.0], [1.0], [3.0], [3.0]])
        assert kernels.weighted_trimmed_mean(spread, weights, 1) == np.float32(310 / 110)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 7), (10, 1000), (33, 172), (130, 2000), (5, 70_001)])
def test_products_are_as_near_as_promised_and_symmetric(path: str, n: int, d: int) -> None:
    for x in (updates_of(n, d, n), torch.full((n, d), 0.1) * torch.randn(n, d).sign()):
        wide = x.double().numpy()
        exact, norms = wide @ wide.T, np.linalg.norm(wide, axis=1)
        with kernels.using(path):
            found = kernels.products(x).numpy()
        assert (np.abs(found - exact) <= 8e-7 * np.outer(norms, norms)).all()
        assert np.array_equal(found, found.T)


@given(st.integers(1, 40), st.integers(1, 3000), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_native_products_agree_to_the_last_bit(n: int, d: int, seed: int) -> None:
    x = updates_of(n, d, seed)
    found = []
    for path in NATIVE:
        with kernels.using(path):
            found.append(kernels.products(x))
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("path", PATHS)
def test_products_of_blocks_add_up_in_the_callers_matrix(path: str) -> None:
    x = updates_of(9, 3000)
    with kernels.using(path):
        total = torch.ones(9, 9, dtype=torch.float64)
        for part in x.split(1100, dim=1):
            assert kernels.products(part.contiguous(), out=total) is total
        whole = kernels.products(x)
    norms = x.double().norm(dim=1)
    assert ((total - 1.0 - whole).abs() <= 1.6e-6 * torch.outer(norms, norms)).all()


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize(("n", "d"), [(10, 70_001), (40, 20_011), (300, 700)])
def test_the_number_of_threads_changes_no_bit(path: str, n: int, d: int) -> None:
    x, threads, found = updates_of(n, d, 3), torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            with kernels.using(path):
                found.append({**results(x, path), "products": kernels.products(x).numpy()})
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(np.array_equal(other[name], found[0][name]) for name in other)


@pytest.mark.parametrize("path", PATHS)
def test_a_result_is_written_into_the_callers_slice(path: str) -> None:
    x, merged = updates_of(6, 50), torch.full((70,), 9.0)
    with kernels.using(path):
        for name, rule in {
            "trimmed": lambda out: kernels.trimmed_mean(x, 1, out=out),
            "weighted": lambda out: kernels.weighted_trimmed_mean(x, weights_of(6), 1, out=out),
            "median": lambda out: kernels.median(x, out=out),
            "around": lambda out: kernels.mean_around_median(x, 3, out=out),
            "combination": lambda out: kernels.linear_combination(x, weights_of(6), out=out),
        }.items():
            merged.fill_(9.0)
            assert rule(merged[10:60]).data_ptr() == merged[10:60].data_ptr(), name
            assert torch.equal(merged[10:60], rule(None)), name
            assert bool((merged[:10] == 9.0).all() and (merged[60:] == 9.0).all()), name


@pytest.mark.parametrize("path", PATHS)
def test_values_that_are_not_finite_come_to_an_end(path: str) -> None:
    for n in (3, 33, 70):
        x = updates_of(n, 40)
        x[0], x[1, ::2], x[2, ::3] = float("nan"), float("inf"), float("-inf")
        with kernels.using(path):
            assert all(rule(x).shape == (40,) for rule in rules(n).values())
            assert kernels.products(x).shape == (n, n)


@pytest.mark.parametrize("path", PATHS)
def test_a_row_of_weight_zero_is_not_looked_at(path: str) -> None:
    x = updates_of(7, 172)
    x[2] = float("nan")
    weights = torch.tensor([0.5, 0.0, 0.0, 2.0, 0.0, -1.0, 0.25], dtype=torch.float64)
    used = weights != 0.0
    with kernels.using(path):
        expected = kernels.linear_combination(x[used], weights[used])
        assert torch.equal(kernels.linear_combination(x, weights), expected)
        assert not kernels.linear_combination(x, torch.zeros(7, dtype=torch.float64)).any()
        one = torch.eye(7, dtype=torch.float64)[3]
        assert torch.equal(kernels.linear_combination(x, one), x[3])


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("n", [15, 16, 17, 33])
def test_a_long_sum_over_several_groups_of_rows_has_the_reference_s_bits(path: str, n: int) -> None:
    x, weights = updates_of(n, 4096 + 37, n), weights_of(n)
    with kernels.using("torch"):
        expected = kernels.linear_combination(x, weights)
    with kernels.using(path):
        assert torch.equal(kernels.linear_combination(x, weights), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "d", "m"), [(1, 1, 1), (5, 172, 3), (32, 5000, 32), (130, 1000, 4), (3, 0, 2)])
def test_many_combinations_are_each_what_one_would_be(path: str, n: int, d: int, m: int) -> None:
    x = updates_of(n, d)
    matrix = torch.randn(m, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    matrix[0, : n // 2] = 0.0
    with kernels.using(path):
        found = kernels.linear_combinations(x, matrix)
        assert found.shape == (m, d)
        for row, weights in zip(found, matrix, strict=True):
            assert torch.equal(row, kernels.linear_combination(x, weights))
        out = torch.empty(m, d)
        assert kernels.linear_combinations(x, matrix, out=out) is out
        assert torch.equal(out, found)
        for wrong in (matrix.float(), matrix[:, 1:], matrix[0]):
            with pytest.raises(CodecError, match="matrix is"):
                kernels.linear_combinations(x, wrong)


@pytest.mark.parametrize("path", PATHS)
def test_no_coordinates_give_no_results(path: str) -> None:
    x, threads = torch.empty(3, 0), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with kernels.using(path):
                assert all(rule(x).shape == (0,) for rule in rules(3).values())
                assert torch.equal(kernels.products(x), torch.zeros(3, 3, dtype=torch.float64))
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_fit_is_refused() -> None:
    x, weights = updates_of(4, 8), weights_of(4)
    for wrong in (x.double(), x[0], x[:, ::2], x[:0], x.T):
        with pytest.raises(CodecError, match=r"wanted contiguous \[n, d\] float32"):
            kernels.median(wrong)
        with pytest.raises(CodecError, match=r"wanted contiguous \[n, d\] float32"):
            kernels.products(wrong)
    for heavy in (weights.float(), weights[:3], weights[None]):
        with pytest.raises(CodecError, match=r"not \[4\] float64"):
            kernels.linear_combination(x, heavy)
        with pytest.raises(CodecError, match=r"not \[4\] float64"):
            kernels.weighted_trimmed_mean(x, heavy, 1)
    for trim in (-1, 2):
        with pytest.raises(CodecError, match="of 4 updates at most 1 can be trimmed"):
            kernels.trimmed_mean(x, trim)
        with pytest.raises(CodecError, match="of 4 updates at most 1 can be trimmed"):
            kernels.weighted_trimmed_mean(x, weights, trim)
    for keep in (0, 5):
        with pytest.raises(CodecError, match="not from 1 to the 4 updates"):
            kernels.mean_around_median(x, keep)
    for out in (torch.empty(7), torch.empty(8, dtype=torch.float64), torch.empty(16)[::2]):
        with pytest.raises(CodecError, match=r"not contiguous \[8\] torch.float32"):
            kernels.trimmed_mean(x, 1, out=out)
    with pytest.raises(CodecError, match=r"not contiguous \[4, 4\] torch.float64"):
        kernels.products(x, out=torch.zeros(4, 4))
