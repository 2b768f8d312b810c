"""Kernels of signs: every path of this machine gives the reference's bits, scales and values, to the last bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gym_quant import CodecError, kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

NATIVE = [name for name in kernels.available() if name != "torch"]
GROUPS = [None, 1, 3, 8, 16, 100, 128, 10_000]
SHAPES = [(1, 1), (3, 37), (5, 128), (7, 300), (1, 4099), (40, 1024)]


def reference(function: str, *arguments: object, **words: object) -> object:
    with kernels.using("torch"):
        return getattr(kernels, function)(*arguments, **words)


def rows(shape: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * torch.randint(0, 5, shape, generator=generator).bool()  # a fifth exact zeros


@pytest.mark.parametrize("path", kernels.available())
def test_bits_are_one_from_zero_up_least_significant_first_rows_padded_with_zeros(path: str) -> None:
    delta = torch.tensor([[1.0, -1.0, 0.0, -0.0, -2.0, -3.0, -1e-45, 1e-45, 5.0], [-1.0] * 8 + [-4.0]])
    with kernels.using(path):
        packed = kernels.pack_signs(delta)
        assert packed.tolist() == [[0b10001101, 0b00000001], [0, 0]]
        assert kernels.unpack_signs(packed, 9)[0].tolist() == [1, -1, 1, 1, -1, -1, -1, 1, 1]


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_and_unpacking_agree_with_the_reference(path: str, shape: tuple[int, int]) -> None:
    delta = rows(shape)
    expected = reference("pack_signs", delta)
    with kernels.using(path):
        packed = kernels.pack_signs(delta)
        assert torch.equal(packed, expected)
        assert torch.equal(kernels.unpack_signs(packed, shape[1]), torch.where(delta >= 0, 1.0, -1.0))


@pytest.mark.few(58, "paths, groups and shapes are independent")
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encoding_agrees_with_the_reference_for_every_group_and_input(
    path: str, group: int | None, shape: tuple[int, int]
) -> None:
    tuned, base, residual = rows(shape, 1), rows(shape, 2), rows(shape, 3)
    for arguments in (
        (tuned, None, group),
        (tuned, base, group),
        (tuned.bfloat16(), base.bfloat16(), group),
        (tuned.bfloat16(), base, group, residual),
        (tuned, base.bfloat16(), group, residual),
        (tuned.half(), base, group),
    ):
        bits, scales = reference("encode_signs", *arguments)
        with kernels.using(path):
            found = kernels.encode_signs(*arguments)
        assert torch.equal(found[0], bits)
        assert torch.equal(found[1], scales)


@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("group", [None, 5, 16])
def test_scales_are_the_mean_magnitude_by_definition(path: str, group: int | None) -> None:
    tuned, base = rows((6, 50), 4), rows((6, 50), 5)
    with kernels.using(path):
        bits, scales = kernels.encode_signs(tuned, base, group)
    delta = (tuned - base).double().numpy()
    assert np.array_equal(np.unpackbits(bits.numpy(), axis=1, count=50, bitorder="little"), delta >= 0)
    width = group or 50
    means = [[np.abs(row[at : at + width]).mean() for at in range(0, 50, width)] for row in delta]
    expected = [np.mean(means)] if group is None else means
    assert np.allclose(scales.numpy(), expected, rtol=1e-6, atol=0)


@given(
    st.integers(1, 9), st.integers(1, 70), st.sampled_from(GROUPS), st.integers(0, 2**32 - 1), st.booleans()
)
@settings(max_examples=60)
def test_decoding_agrees_for_any_bits_and_scales(
    height: int, cols: int, group: int | None, seed: int, add: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (height, (cols + 7) // 8), dtype=torch.uint8, generator=generator)
    groups = 1 if group is None else -(-cols // min(group, cols))
    scales = torch.rand((1,) if group is None else (height, groups), generator=generator)
    before = torch.randn(height, cols, generator=generator)
    found = []
    for path in kernels.available():
        with kernels.using(path):
            found.append(kernels.decode_signs(bits, scales, cols, group, out=before.clone(), add=add))
    assert all(torch.equal(one.view(torch.int32), found[-1].view(torch.int32)) for one in found)
    width = cols if group is None else min(group, cols)
    plain = torch.where(reference("unpack_signs", bits, cols) > 0, 1.0, -1.0)
    wide = scales.expand(height, -1).repeat_interleave(width, dim=1)[:, :cols]
    assert torch.equal(found[0], before + plain * wide if add else plain * wide)


@pytest.mark.parametrize("path", kernels.available())
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", [None, 3, 16])
def test_a_value_that_is_not_finite_is_refused_with_its_place(
    path: str, bad: float, group: int | None
) -> None:
    tuned = rows((5, 33), 6)
    tuned[2, 31] = tuned[4, 0] = bad
    with kernels.using(path), pytest.raises(CodecError, match=r"not finite.*flat index 97"):
        kernels.encode_signs(tuned, None, group)


@pytest.mark.parametrize("path", kernels.available())
def test_a_difference_too_large_for_float32_is_refused(path: str) -> None:
    large = torch.full((1, 20), 3e38)
    with kernels.using(path), pytest.raises(CodecError, match="inf at flat index 0"):
        kernels.encode_signs(large, -large)


@pytest.mark.parametrize("path", NATIVE)
def test_the_number_of_threads_changes_no_bit(path: str) -> None:
    tuned, threads = rows((700, 1000), 7), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with kernels.using(path):
                bits, scales = kernels.encode_signs(tuned, None)
                found.append((bits, scales, kernels.decode_signs(bits, scales, 1000)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(CodecError, match="not match 20 columns"):
        kernels.unpack_signs(packed, 20)
    with pytest.raises(CodecError, match=r"scales are \[1\], not \[2, 2\]"):
        kernels.decode_signs(packed, torch.ones(1), 16, 8)
    with pytest.raises(CodecError, match="pass out"):
        kernels.decode_signs(packed, torch.ones(1), 16, add=True)
    with pytest.raises(CodecError, match="out is"):
        kernels.decode_signs(packed, torch.ones(1), 16, out=torch.zeros(2, 15))
    with pytest.raises(CodecError, match="base is"):
        kernels.encode_signs(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(CodecError, match="no elements"):
        kernels.encode_signs(torch.ones(0, 3), None)
    with pytest.raises(CodecError, match="group_size is 0"):
        kernels.encode_signs(torch.ones(2, 3), None, 0)
    with pytest.raises(CodecError, match="not a matrix"):
        kernels.pack_signs(torch.ones(3))
