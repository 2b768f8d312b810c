"""BitDelta: the bits by hand, the scales by definition, any shape by hypothesis."""

from __future__ import annotations

import math

import pytest
import torch
from gym_quant import CodecError, get_codec
from gym_quant.packing import pack_signs, unpack_signs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

BITDELTA = get_codec("bitdelta")

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=40)
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def test_the_bits_are_one_from_zero_up_least_significant_first_rows_padded() -> None:
    delta = torch.tensor([[1.0, -1.0, 0.0, -0.0, -2.0, -3.0, -1e-30, 1e-30, 5.0], [-1.0] * 8 + [-4.0]])
    assert pack_signs(delta).tolist() == [[0b10001101, 0b00000001], [0, 0]]


def test_the_scale_is_the_mean_magnitude_of_the_tensor() -> None:
    encoded = BITDELTA.encode(torch.tensor([[1.0, -2.0], [0.0, 5.0]]))
    assert encoded.params == {}
    assert encoded.payload["scales"].tolist() == [2.0]


def test_a_group_has_its_own_scale_and_the_last_may_be_short() -> None:
    encoded = BITDELTA.encode(torch.tensor([[1.0, -3.0, 7.0], [0.0, 0.5, -0.25]]), group_size=2)
    assert encoded.payload["scales"].tolist() == [[2.0, 7.0], [0.25, 0.25]]
    decoded = BITDELTA.decode(encoded.payload, (2, 3), encoded.params)
    assert decoded.tolist() == [[2.0, -2.0, 7.0], [0.25, 0.25, -0.25]]


def test_a_group_wider_than_the_row_is_the_row() -> None:
    encoded = BITDELTA.encode(torch.tensor([[1.0, -3.0, 2.0]]), group_size=128)
    assert encoded.payload["scales"].tolist() == [[2.0]]
    assert BITDELTA.norm(encoded.payload, (1, 3), encoded.params) == pytest.approx(2.0 * math.sqrt(3))


@given(hnp.arrays("float32", shapes, elements=finite), st.sampled_from([None, 1, 3, 8, 128]))
def test_any_shape_comes_back_with_its_signs_and_its_scale(array: object, group: int | None) -> None:
    delta = torch.as_tensor(array)
    encoded = BITDELTA.encode(delta, group_size=group)
    shape = tuple(delta.shape)
    decoded = BITDELTA.decode(encoded.payload, shape, encoded.params)
    assert torch.equal(decoded >= 0, (delta >= 0) | (decoded == 0))
    if group is None:
        assert float(decoded.abs().min()) == float(decoded.abs().max())
        assert float(decoded.abs().max()) == pytest.approx(
            float(delta.double().abs().mean()), rel=1e-6, abs=1e-38
        )
    norm = BITDELTA.norm(encoded.payload, shape, encoded.params)
    assert norm == pytest.approx(float(decoded.double().norm()), rel=1e-6)


@given(hnp.arrays("float32", shapes, elements=st.floats(-1, 1, width=32)))
def test_the_error_is_what_the_mean_magnitude_leaves(array: object) -> None:
    """|d - s sign(d)|^2 = |d|^2 - n s^2 for s = mean |d| (Liu et al. 2024, eq. 3)."""
    delta = torch.as_tensor(array)
    encoded = BITDELTA.encode(delta)
    decoded = BITDELTA.decode(encoded.payload, tuple(delta.shape), encoded.params).double()
    left = float(delta.double().square().sum() - decoded.square().sum())
    assert float((delta.double() - decoded).square().sum()) == pytest.approx(left, abs=1e-6 * delta.numel())


@given(hnp.arrays("float32", hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=finite))
def test_padding_bits_are_ignored(array: object) -> None:
    delta = torch.as_tensor(array)
    rows, cols = delta.shape
    packed = pack_signs(delta)
    noisy = packed.clone()
    if cols % 8:
        noisy[:, -1] |= 256 - (1 << cols % 8)
    assert torch.equal(unpack_signs(noisy, cols), unpack_signs(packed, cols))
    assert packed.shape == (rows, math.ceil(cols / 8))


def test_a_negative_scale_is_refused() -> None:
    encoded = BITDELTA.encode(torch.ones(4, 8))
    with pytest.raises(CodecError, match="scale is negative"):
        BITDELTA.check({**encoded.payload, "scales": torch.tensor([-1.0])}, (4, 8), {})


@pytest.mark.parametrize("group", [0, -8, 1.5, True, "8"])
def test_a_group_size_that_is_no_whole_number_is_refused(group: object) -> None:
    with pytest.raises(CodecError, match="group_size is"):
        BITDELTA.encode(torch.ones(4, 8), group_size=group)


def test_an_unknown_scale_dtype_is_refused() -> None:
    with pytest.raises(CodecError, match="scale_dtype is 'int8'"):
        BITDELTA.encode(torch.ones(4, 8), scale_dtype="int8")
