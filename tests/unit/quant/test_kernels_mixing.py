"""Kernels of robust merging: products, votes and trimmed combinations by every path, against whole numbers by numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from gym_quant.kernels import native
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

PATHS = kernels.available()
SHAPES = st.tuples(st.integers(1, 6), st.sampled_from([1, 7, 8, 9, 64, 172, 700]))
NUMBERS = st.integers(0, 2**32 - 1)
LARGEST = 2**31 - 1


def contributors(
    n: int, rows: int, cols: int, random: np.random.Generator
) -> tuple[list[Tensor], np.ndarray]:
    """Packed bits, and the signs ``[n, rows, cols]`` that they stand for."""
    signs = random.integers(0, 2, (n, rows, cols)) * 2 - 1
    return [kernels.pack_signs(torch.from_numpy(one.astype(np.float32))) for one in signs], signs


def mixture(m: int, n: int, most: int, random: np.random.Generator) -> np.ndarray:
    """Weights of neighbours, of one kind or another: all different, a column's weight or none, equal rows."""
    kind = random.integers(0, 3)
    if kind == 0:
        return random.integers(-most, most + 1, (m, n))
    weights = random.integers(1, most + 1, n) * random.choice([-1, 1], n)
    chosen = np.where(random.random((m, n)) < random.random(), 0, weights)
    if kind == 2:
        chosen[random.integers(0, m, m // 2)] = chosen[0]
    return chosen


def trimmed(mixing: np.ndarray, signs: np.ndarray, trim: int, unit: float) -> np.ndarray:
    mixed = np.sort(np.tensordot(mixing, signs, axes=1), axis=0)
    return (mixed[trim : len(mixed) - trim].sum(axis=0).astype(np.float64) * unit).astype(np.float32)


def by_every_path(compute: Callable[[], Tensor], threads: Sequence[int] = (1, 2, 4)) -> Tensor:
    """What ``compute`` returns, the same bit for bit by every path and number of threads."""
    found, before = [], torch.get_num_threads()
    try:
        for path in PATHS:
            for count in threads:
                torch.set_num_threads(count)
                with kernels.using(path):
                    found.append(compute())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@given(st.integers(1, 70), SHAPES, st.sampled_from([None, 8, 64, 128, 5, 172, 10**6]), NUMBERS)
@settings(max_examples=40)
def test_products_are_those_of_the_decoded_deltas(
    n: int, shape: tuple[int, int], group: int | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, cols = shape
    bits, _ = contributors(n, rows, cols, random)
    sizes = [1] if group is None else [rows, -(-cols // min(group, cols))]
    scales = [torch.from_numpy(random.random(sizes, dtype=np.float32)) for _ in range(n)]
    dense = np.stack(
        [
            kernels.decode_signs(b, s, cols, group).numpy().astype(np.float64).ravel()
            for b, s in zip(bits, scales, strict=True)
        ]
    )
    products = by_every_path(lambda: kernels.sign_products(bits, scales, cols, group))
    assert products.dtype == torch.float64
    assert np.allclose(products.numpy(), dense @ dense.T, rtol=1e-12, atol=1e-9)
    assert torch.equal(products, products.T)


def test_products_with_scales_that_are_powers_of_two_are_exact() -> None:
    random = np.random.default_rng(3)
    bits, signs = contributors(9, 40, 2050, random)  # more than one block of bytes
    whole = torch.tensor(2.0 ** random.integers(-3, 4, (9, 40, 17)), dtype=torch.bfloat16)
    wide = np.repeat(whole.to(torch.float64).numpy(), 128, axis=2)[:, :, :2050] * signs
    expected = np.einsum("irc,jrc->ij", wide, wide)
    assert np.array_equal(
        by_every_path(lambda: kernels.sign_products(bits, list(whole), 2050, 128)), expected
    )
    single = [whole[i, 0, :1] for i in range(9)]
    scaled = signs.reshape(9, -1) * whole[:, 0, :1].to(torch.float64).numpy()
    found = by_every_path(lambda: kernels.sign_products(bits, single, 2050, None))
    assert np.array_equal(found, scaled @ scaled.T)


@given(st.integers(1, 70), SHAPES, st.sampled_from([0, 1, 5, 1000, 30_000_000]), NUMBERS)
@settings(max_examples=40)
def test_votes_are_weighted_sums_of_signs_and_combinations_their_multiples(
    n: int, shape: tuple[int, int], most: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    bits, signs = contributors(n, *shape, random)
    weights = random.integers(-most, most + 1, n)
    sums = np.tensordot(weights, signs, axes=1)
    given_weights = torch.from_numpy(weights)
    found = by_every_path(lambda: kernels.signed_votes(bits, given_weights, shape[1]))
    assert found.dtype == torch.int32
    assert np.array_equal(found, sums)
    combined = by_every_path(lambda: kernels.signed_combination(bits, given_weights, 0.3, shape[1]))
    assert np.array_equal(combined, (sums * 0.3).astype(np.float32))


@pytest.mark.parametrize(
    "weights", [[LARGEST], [-LARGEST, 0], [2**30, 2**30 - 1], [3, 3, 3], [0], [2**31 - 8, -7]]
)
def test_votes_reach_the_largest_sums(weights: list[int]) -> None:
    bits, signs = contributors(len(weights), 2, 600, np.random.default_rng(1))
    found = by_every_path(lambda: kernels.signed_votes(bits, torch.tensor(weights), 600))
    assert np.array_equal(found, np.tensordot(weights, signs, axes=1))


def test_hundreds_of_contributors_vote_and_are_trimmed() -> None:
    random = np.random.default_rng(5)
    bits, signs = contributors(700, 3, 171, random)
    weights = random.integers(-1000, 1000, 700)
    found = by_every_path(lambda: kernels.signed_votes(bits, torch.from_numpy(weights), 171), (2,))
    assert np.array_equal(found, np.tensordot(weights, signs, axes=1))
    diagonal = np.diag(weights)
    kept = by_every_path(
        lambda: kernels.signed_trimmed(bits, torch.from_numpy(diagonal), 171, 100, 0.1), (2,)
    )
    assert np.array_equal(kept, trimmed(diagonal, signs, 100, 0.1))


@given(
    st.integers(1, 70), st.integers(1, 70), SHAPES, st.sampled_from([1, 3, 1000, None]), NUMBERS, st.data()
)
@settings(max_examples=50)
def test_trimmed_sums_are_those_of_the_sorted_mixtures(
    m: int, n: int, shape: tuple[int, int], most: int | None, seed: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    bits, signs = contributors(n, *shape, random)
    mixing = mixture(m, n, most or LARGEST // n, random)
    trim = data.draw(st.integers(0, (m - 1) // 2))
    found = by_every_path(
        lambda: kernels.signed_trimmed(bits, torch.from_numpy(mixing), shape[1], trim, 0.7), (1, 3)
    )
    assert found.dtype == torch.float32
    assert np.array_equal(found, trimmed(mixing, signs, trim, 0.7))


@pytest.mark.parametrize("size", [32_767, 32_768, LARGEST])
@pytest.mark.parametrize("m", [3, 33, 65])
def test_trimmed_sums_reach_the_ends_of_16_and_32_bits(m: int, size: int) -> None:
    random = np.random.default_rng(7)
    bits, signs = contributors(4, 2, 999, random)
    mixing = np.zeros((m, 4), dtype=np.int64)
    mixing[:, 0], mixing[:, 2] = size - 1, 1
    mixing[::2] = -mixing[::2]
    mixing[m // 2] = [0, size, 0, 0]
    for trim in (0, 1, (m - 1) // 2):
        found = by_every_path(
            lambda t=trim: kernels.signed_trimmed(bits, torch.from_numpy(mixing), 999, t, 1.0)
        )
        assert np.array_equal(found, trimmed(mixing, signs, trim, 1.0))


def test_a_diagonal_gives_the_trimmed_mean_and_the_median_of_scaled_signs() -> None:
    random = np.random.default_rng(11)
    bits, signs = contributors(9, 5, 172, random)
    scales = random.integers(1, 900, 9)
    values = np.sort(scales[:, None, None] * signs, axis=0)
    mixing = torch.diag(torch.from_numpy(scales))
    median = by_every_path(lambda: kernels.signed_trimmed(bits, mixing, 172, 4, 0.5))
    assert np.array_equal(median, (0.5 * values[4]).astype(np.float32))
    mean = by_every_path(lambda: kernels.signed_trimmed(bits, mixing, 172, 2, 1 / 5))
    assert np.allclose(mean, values[2:7].mean(axis=0), rtol=1e-6)


@pytest.mark.skipif("avx512" not in PATHS, reason="this processor lacks AVX-512")
def test_processors_without_vector_popcount_find_the_same_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, _ = contributors(67, 3, 9000, np.random.default_rng(8))
    single, rows = [torch.ones(1)] * 67, [torch.rand(3, 1) for _ in bits]
    stacked = torch.stack(bits).reshape(67, -1)

    def found() -> list[Tensor]:
        with kernels.using("avx512"):
            products = [kernels.sign_products(bits, single, 9000, None)]
            return [*products, kernels.sign_products(bits, rows, 9000, 9000), kernels.hamming(stacked)]

    expected = found()
    monkeypatch.setattr(native, "features", lambda: native.HAS_AVX2 | native.HAS_AVX512)
    assert all(torch.equal(a, b) for a, b in zip(expected, found(), strict=True))


@pytest.mark.skipif(PATHS == ("torch",), reason="there is no native extension")
def test_an_extension_built_before_a_function_was_added_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native._SIGNATURES, "gq_added_later", [])
    native._load.cache_clear()
    try:
        assert "lacks gq_added_later: reinstall the package" in native.absence()
    finally:
        monkeypatch.undo()
        native._load.cache_clear()
    assert native.absence() == ""


def test_results_are_written_into_out_and_nowhere_else() -> None:
    bits, signs = contributors(3, 4, 13, np.random.default_rng(2))
    around = torch.full((6, 13), 99.0)
    ones, eye = torch.ones(3, dtype=torch.int32), torch.eye(3, dtype=torch.int32)
    for path in PATHS:
        with kernels.using(path):
            assert (
                kernels.signed_trimmed(bits, eye, 13, 1, 2.0, around[1:5]).data_ptr() == around[1].data_ptr()
            )
            assert np.array_equal(around[1:5], 2.0 * np.sort(signs, axis=0)[1])
            kernels.signed_combination(bits, ones, 1.0, 13, around[1:5])
            assert np.array_equal(around[1:5], signs.sum(axis=0))
            assert (around[[0, 5]] == 99).all()


def test_rows_lie_where_they_are_even_on_odd_addresses() -> None:
    random = np.random.default_rng(4)
    bits, signs = contributors(5, 7, 900, random)
    moved = []
    for k, one in enumerate(bits):
        room = torch.zeros(one.numel() + 7, dtype=torch.uint8)
        room[k : k + one.numel()] = one.flatten()
        moved.append(room[k : k + one.numel()].view(one.shape))
    votes = by_every_path(lambda: kernels.signed_votes(moved, torch.arange(5), 900))
    assert np.array_equal(votes, np.tensordot(np.arange(5), signs, axes=1))


def test_what_does_not_fit_is_refused_by_name() -> None:
    bits, _ = contributors(2, 3, 20, np.random.default_rng(0))
    ones, eye = torch.ones(2, dtype=torch.int32), torch.eye(2, dtype=torch.int32)
    half = [torch.ones(1), torch.ones(1)]
    with pytest.raises(CodecError, match="at least one"):
        kernels.signed_votes([], ones, 20)
    with pytest.raises(CodecError, match=r"bits\[1\] are \[2, 3\]"):
        kernels.signed_votes([bits[0], bits[1][:2]], ones, 20)
    with pytest.raises(CodecError, match=r"bits\[0\] are \[3, 3\] torch.uint8 .* not \[3, 4\] .*25 columns"):
        kernels.signed_votes(bits, ones, 25)
    with pytest.raises(CodecError, match="cols is 0"):
        kernels.signed_votes(bits, ones, 0)
    with pytest.raises(CodecError, match=r"weights are \[2\] torch.float32, not \[2\] integers"):
        kernels.signed_votes(bits, ones.float(), 20)
    with pytest.raises(CodecError, match=r"weights: magnitudes sum to 2147483648, more than 2147483647"):
        kernels.signed_votes(bits, torch.tensor([2**31 - 1, -1]), 20)
    with pytest.raises(CodecError, match="row 1 of mixing: magnitudes sum to 4294967296"):
        kernels.signed_trimmed(bits, torch.tensor([[1, 0], [-(2**31), 2**31]]), 20, 0, 1.0)
    with pytest.raises(CodecError, match=r"mixing is \[2, 1\] torch.int32, not \[m, 2\] integers"):
        kernels.signed_trimmed(bits, eye[:, :1], 20, 0, 1.0)
    with pytest.raises(CodecError, match="trim is 1: of 2 rows at most 0 can"):
        kernels.signed_trimmed(bits, eye, 20, 1, 1.0)
    with pytest.raises(CodecError, match="trim is -1"):
        kernels.signed_trimmed(bits, eye, 20, -1, 1.0)
    with pytest.raises(CodecError, match="unit is nan"):
        kernels.signed_combination(bits, ones, float("nan"), 20)
    with pytest.raises(
        CodecError, match=r"out is \[3, 20\] torch.float32 on cpu, not a contiguous torch.int32"
    ):
        kernels.signed_votes(bits, ones, 20, torch.empty(3, 20))
    with pytest.raises(CodecError, match="scales are given for 1 tensors, bits for 2"):
        kernels.sign_products(bits, half[:1], 20, None)
    with pytest.raises(CodecError, match=r"scales\[0\] are \[1\] torch.float32, not \[3, 3\]"):
        kernels.sign_products(bits, half, 20, 8)
    with pytest.raises(CodecError, match="group_size is 0"):
        kernels.sign_products(bits, half, 20, 0)
