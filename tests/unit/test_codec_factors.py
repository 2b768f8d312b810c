"""Dense values and LoRA factors: rounding, exactness, and what is refused."""

from __future__ import annotations

import pytest
import torch
from gym_quant import CodecError, get_codec
from gym_quant.codecs.lora import Lora
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

DENSE = get_codec("dense")
LORA = Lora()


def factors(rank: int = 4, rows: int = 64, cols: int = 172) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rank, cols, generator=generator), torch.randn(rows, rank, generator=generator)


@given(
    hnp.arrays(
        "float32",
        hnp.array_shapes(max_dims=3, max_side=20),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    )
)
@settings(deadline=None)
def test_bfloat16_is_off_by_at_most_one_part_in_256_and_float32_by_nothing(array: object) -> None:
    delta = torch.as_tensor(array)
    shape = tuple(delta.shape)
    rounded = DENSE.encode(delta)
    error = (DENSE.decode(rounded.payload, shape, rounded.params) - delta).abs()
    assert bool((error <= delta.abs() / 256 + 1e-38).all())
    exact = DENSE.encode(delta, dtype="float32")
    assert torch.equal(DENSE.decode(exact.payload, shape, exact.params), delta)


def test_what_overflows_bfloat16_is_refused() -> None:
    with pytest.raises(CodecError, match="rounded to bfloat16 is not finite"):
        DENSE.encode(torch.tensor([3.4028e38]))


def test_decoded_values_are_the_callers_own() -> None:
    encoded = DENSE.encode(torch.ones(2, 2), dtype="float32")
    DENSE.decode(encoded.payload, (2, 2), encoded.params).zero_()
    assert bool(encoded.payload["values"].all())


def test_trained_factors_are_kept_and_multiplied() -> None:
    a, b = factors()
    encoded = LORA.encode_factors(a, b, 0.25)
    decoded = LORA.decode(encoded.payload, (64, 172), encoded.params)
    wanted = 0.25 * (b.bfloat16().double() @ a.bfloat16().double())
    assert encoded.params == {"rank": 4, "scaling": 0.25}
    torch.testing.assert_close(decoded.double(), wanted, rtol=1e-7, atol=1e-30)


def test_a_delta_of_low_rank_is_found_again() -> None:
    a, b = factors()
    delta = b @ a
    encoded = LORA.encode(delta, rank=4, scaling=-2.0)
    decoded = LORA.decode(encoded.payload, (64, 172), encoded.params)
    assert float((decoded - delta).norm() / delta.norm()) < 2**-7


def test_factors_that_do_not_fit_each_other_are_refused() -> None:
    a, b = factors()
    with pytest.raises(CodecError, match=r"A \[4, 172\] and B \[64, 3\] do not fit"):
        LORA.encode_factors(a, b[:, :3])


def test_factors_whose_product_could_overflow_are_refused() -> None:
    a, b = factors()
    with pytest.raises(CodecError, match="overflow"):
        LORA.encode_factors(a * 1e20, b * 1e20)


@pytest.mark.parametrize("params", [{}, {"rank": 0}, {"rank": 65}, {"rank": 2, "scaling": float("inf")}])
def test_ranks_and_scalings_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(CodecError, match=r"rank is|scaling is"):
        LORA.encode(torch.ones(64, 172), **params)


def test_a_vector_has_no_factors() -> None:
    with pytest.raises(CodecError, match="not a matrix"):
        LORA.encode(torch.ones(64), rank=1)
