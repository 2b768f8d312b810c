"""Kernels that count: distances, votes and majorities by every path, against a count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

PATHS = kernels.available()


def packed_rows(n: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, width), dtype=torch.uint8, generator=generator)


def bits_of(packed: Tensor) -> np.ndarray:
    return np.unpackbits(packed.numpy(), axis=1, bitorder="little").astype(np.int64)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("n", "width"), [(1, 1), (2, 63), (5, 700), (33, 5001), (3, 70_003)])
def test_counts_are_those_of_the_unpacked_bits(path: str, n: int, width: int) -> None:
    packed = packed_rows(n, width)
    bits = bits_of(packed)
    weights = torch.arange(n) * 1000 - 700
    with kernels.using(path):
        distances, counts = kernels.hamming(packed), kernels.votes(packed)
        sums, most = kernels.votes(packed, weights), kernels.majority(packed)
    assert distances.dtype == torch.int64
    assert counts.dtype == sums.dtype == torch.int32
    assert np.array_equal(distances.numpy(), [(bits != row).sum(axis=1) for row in bits])
    assert np.array_equal(counts.numpy(), bits.sum(axis=0))
    assert np.array_equal(sums.numpy(), weights.numpy() @ bits)
    assert np.array_equal(bits_of(most[None])[0], 2 * bits.sum(axis=0) >= n)


@given(st.integers(1, 70), st.integers(1, 600), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_every_path_agrees_for_any_number_of_rows(n: int, width: int, seed: int) -> None:
    packed = packed_rows(n, width, seed)
    found = []
    for path in PATHS:
        with kernels.using(path):
            found.append((kernels.hamming(packed), kernels.votes(packed), kernels.majority(packed)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_all_ones_are_counted_in_full_and_a_tie_is_a_one(path: str) -> None:
    with kernels.using(path):
        ones = torch.full((64, 9), 255, dtype=torch.uint8)
        assert kernels.votes(ones).tolist() == [64] * 72
        assert kernels.hamming(torch.stack([ones[0], ~ones[0]])).tolist() == [[0, 72], [72, 0]]
        tie = torch.tensor([[0b1100], [0b1010]], dtype=torch.uint8)
        assert kernels.majority(tie).tolist() == [0b1110]


@pytest.mark.parametrize("path", [name for name in PATHS if name != "torch"])
def test_the_number_of_threads_changes_no_count(path: str) -> None:
    packed, threads = packed_rows(7, 40_000, 3), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with kernels.using(path):
                found.append((kernels.hamming(packed), kernels.votes(packed), kernels.majority(packed)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("path", [name for name in PATHS if name != "torch"])
def test_distances_of_more_bytes_than_the_cache_holds_are_the_sums_of_their_parts(path: str) -> None:
    packed = packed_rows(70, 200_003)
    with kernels.using(path):
        parts = [kernels.hamming(part.contiguous()) for part in packed.split(50_000, dim=1)]
        assert torch.equal(kernels.hamming(packed), sum(parts))


def test_weights_that_could_overflow_and_things_that_are_not_packed_are_refused() -> None:
    packed = packed_rows(2, 3)
    with pytest.raises(CodecError, match="weights sum to 4294967294"):
        kernels.votes(packed, torch.tensor([2**31 - 1, -(2**31) + 1]))
    with pytest.raises(CodecError, match=r"not \[2\] integers"):
        kernels.votes(packed, torch.tensor([0.5, 0.5]))
    with pytest.raises(CodecError, match="not \\[n, bytes\\] uint8"):
        kernels.hamming(packed.to(torch.int32))
    with pytest.raises(CodecError, match="at least one row"):
        kernels.majority(packed[:0])
