"""Dense values and LoRA factors: rounding, exactness, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import CodecError, Encoded, get_codec
from gym_quant.codecs.lora import Lora
from gym_quant.factor_encoding import decode_factor, encode_factor, factor_codecs
from gym_quant.factors import components_of_matrix, components_of_product, parse_plan, plan_factors
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


@pytest.mark.parametrize("spread", [0, 12])
def test_factors_in_float32_give_the_product_to_one_in_ten_million(spread: int) -> None:
    a, b = factors(16)
    scale = 10.0 ** torch.linspace(-spread / 2, spread / 2, 16)
    a, b = a * scale[:, None], b / scale
    encoded = LORA.encode_factors(a, b, 0.3, factors="float32")
    assert encoded.params == {"rank": 16, "scaling": 0.3, "factors": "float32"}
    assert torch.equal(encoded.payload["a"], a)
    wanted = 0.3 * (b.double() @ a.double())
    decoded = LORA.decode(encoded.payload, (64, 172), encoded.params)
    assert float((decoded - wanted).norm() / wanted.norm()) < 1e-7
    assert LORA.norm(encoded.payload, (64, 172), encoded.params) == pytest.approx(float(wanted.norm()))


def test_a_product_of_float32_factors_has_the_same_bits_on_any_threads_and_in_any_block() -> None:
    a, b = factors(48, 300, 700)
    encoded = LORA.encode_factors(a, b, 0.3, factors="float32")
    before, found = torch.get_num_threads(), []
    try:
        for threads, step in ((1, 300), (2, 300), (3, 70), (2, 1)):
            torch.set_num_threads(threads)
            blocks = [
                LORA.decode_rows(encoded.payload, (300, 700), encoded.params, at, min(300, at + step))
                for at in range(0, 300, step)
            ]
            found.append(torch.cat(blocks))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_delta_of_low_rank_is_found_again_more_exactly_in_float32() -> None:
    a, b = factors()
    delta = b @ a
    encoded = LORA.encode(delta, rank=4, scaling=-2.0, factors="float32")
    decoded = LORA.decode(encoded.payload, (64, 172), encoded.params)
    assert float((decoded - delta).norm() / delta.norm()) < 1e-6


@given(shape=st.tuples(st.integers(2, 9), st.integers(2, 9)), seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_any_float32_factors_decode_to_finite_values_or_are_refused(
    shape: tuple[int, int], seed: int
) -> None:
    params = LORA.normalise({"rank": 2, "factors": "float32", "scaling": 1e-30}, shape)
    generator = np.random.default_rng(seed)
    spec = LORA.payload_spec(shape, params).items()
    payload = {
        field: torch.from_numpy(generator.integers(0, 256, math.prod(size) * 4, np.uint8))
        .view(torch.float32)
        .reshape(size)
        for field, (_, size) in spec
    }
    try:
        LORA.check(payload, shape, params)
    except CodecError:
        return
    assert bool(torch.isfinite(LORA.decode(payload, shape, params)).all())
    assert math.isfinite(LORA.norm(payload, shape, params))


def test_a_delta_of_low_rank_is_found_again() -> None:
    a, b = factors()
    delta = b @ a
    encoded = LORA.encode(delta, rank=4, scaling=-2.0)
    decoded = LORA.decode(encoded.payload, (64, 172), encoded.params)
    assert float((decoded - delta).norm() / delta.norm()) < 2**-7


def test_factors_that_do_not_fit_each_other_are_refused() -> None:
    a, b = factors()
    with pytest.raises(CodecError, match=r"A \[4, 172\] and B \[64, 3\] do not match"):
        LORA.encode_factors(a, b[:, :3])


def test_factors_whose_product_could_overflow_are_refused() -> None:
    a, b = factors()
    with pytest.raises(CodecError, match="overflow"):
        LORA.encode_factors(a * 1e20, b * 1e20)


@pytest.mark.parametrize(
    "params",
    [{}, {"rank": 0}, {"rank": 65}, {"rank": 2, "scaling": float("inf")}, {"rank": 2, "scaling": 10**400}],
)
def test_ranks_and_scalings_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(CodecError, match=r"rank is|scaling is"):
        LORA.encode(torch.ones(64, 172), **params)


PLANS = ["int8", "int4", "int2", "ternary", "binary", "int8*1,int4*2,ternary*1"]


def quantised(plan: str, rank: int = 4) -> tuple[Encoded, torch.Tensor]:
    a, b = factors(rank)
    b = b * 0.5 ** torch.arange(rank)
    return LORA.encode_factors(a, b, 0.25, factors=plan), 0.25 * (b.double() @ a.double())


@pytest.mark.parametrize("plan", PLANS)
def test_the_product_of_quantised_factors_is_that_of_the_decoded_ones_by_the_formula(plan: str) -> None:
    encoded, _ = quantised(plan)
    by_name = {}
    for factor, width in (("a", 172), ("b", 64)):
        rows = []
        for part, (name, count) in enumerate(parse_plan(plan, 4)):
            fields = {
                key.removeprefix(f"{factor}{part}_"): field
                for key, field in encoded.payload.items()
                if key.startswith(f"{factor}{part}_")
            }
            params = {"group_size": 128, "scale_dtype": "bfloat16", "symmetric": name != "int2"}
            kept = get_codec(name).normalise(params, (count, width))
            rows.append(get_codec(name).decode(fields, (count, width), kept))
        by_name[factor] = torch.cat(rows).bfloat16().double()
    decoded = LORA.decode(encoded.payload, (64, 172), encoded.params)
    assert torch.equal(decoded, (by_name["b"].T @ by_name["a"]).float())
    a, b = LORA.factors(encoded.payload, (64, 172), encoded.params)
    assert torch.equal(decoded, (b.double() @ a.double()).float())


@pytest.mark.parametrize(
    ("plan", "most"), [("int8", 0.02), ("int4", 0.18), ("int2", 0.45), ("ternary", 0.57)]
)
def test_refitting_one_factor_to_the_other_lowers_the_error_of_the_product(plan: str, most: float) -> None:
    encoded, product = quantised(plan)
    error = (LORA.decode(encoded.payload, (64, 172), encoded.params) - product).norm() / product.norm()
    a, b = factors()
    found = components_of_product(0.25 * (b * 0.5 ** torch.arange(4)).double(), a)
    apart = [
        decode_factor(
            encode_factor(factor.float(), parse_plan(plan, 4), 128, "x"), parse_plan(plan, 4), width, 128, "x"
        )
        for factor, width in ((found.left.T.contiguous(), 64), (found.right, 172))
    ]
    naive = (apart[0].double().T @ apart[1].double() - product).norm() / product.norm()
    assert error < most
    assert error < naive if plan in ("int2", "ternary") else error <= naive


def test_large_matrices_find_their_components_without_a_full_svd() -> None:
    generator = torch.Generator().manual_seed(2)
    b = torch.randn(900, 6, generator=generator) * 0.5 ** torch.arange(6)
    matrix = b @ torch.randn(6, 800, generator=generator)
    noisy = matrix + 1e-3 * torch.randn(900, 800, generator=generator)
    for start in (None, b):
        found = components_of_matrix(noisy, 6, start)
        assert float((found.left @ found.right - matrix).norm() / matrix.norm()) < 0.01


def test_a_plan_spends_no_more_than_its_budget_and_more_on_the_first_components() -> None:
    a, b = factors(8)
    tensors = {
        "loud": components_of_product(4 * b, a),
        "quiet": components_of_product(b * 0.5 ** torch.arange(8), a),
    }
    for bits in (0.5, 1.0, 2.0, 4.0):
        budget = int(bits * 2 * (a.numel() + b.numel()) / 8)
        plans = plan_factors(tensors, budget)
        spent = sum(
            LORA.payload_bytes((64, 172), LORA.normalise({"rank": rank, "factors": plan}, (64, 172)))
            for rank, plan in plans.values()
        )
        assert spent <= budget
        assert plans["loud"][0] >= plans.get("quiet", (0, ""))[0]
        for rank, plan in plans.values():
            names = [name for name, _ in parse_plan(plan, rank)]
            assert names == [name for name in factor_codecs() if name in names]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"factors": "int3"}, "it must be bfloat16, float32, or parts"),
        ({"factors": "int8*1,int4"}, "it must be bfloat16, float32, or parts"),
        ({"factors": "int8*1,int4*2"}, "does not add up to rank 4"),
        ({"factors": "int8*4"}, "not in normal form 'int8'"),
        ({"factors": "int8*1,int8*3"}, "not in normal form 'int8'"),
        ({"factors": 4}, "factors is 4"),
        ({"factors": "int4", "scaling": 0.5}, "quantised factors have no scaling"),
        ({"factor_group_size": 64}, "applies to quantised factors"),
        ({"factors": "float32", "factor_group_size": 64}, "applies to quantised factors"),
        ({"factors": "int4", "factor_group_size": 0}, "factor_group_size is 0"),
    ],
)
def test_plans_and_groups_out_of_range_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        LORA.encode(torch.ones(64, 172), rank=4, **params)


def random_payload(spec: dict[str, tuple[torch.dtype, tuple[int, ...]]], seed: int, tame: bool) -> Any:
    """Bytes as they fall; tame ones have no sign bit, few infinities, and bytes of five trits."""
    generator = np.random.default_rng(seed)
    payload = {}
    for field, (dtype, size) in spec.items():
        raw = generator.integers(0, 256, math.prod(size) * dtype.itemsize, dtype=np.uint8)
        if tame:
            raw %= np.uint8(243 if dtype == torch.uint8 else 128 if seed % 2 else 64)
        payload[field] = torch.from_numpy(raw).view(dtype).reshape(size)
    return payload


@given(
    plan=st.sampled_from(PLANS),
    group=st.sampled_from([3, 128]),
    shape=st.tuples(st.integers(4, 20), st.integers(4, 20)),
    seed=st.integers(0, 2**32),
    tame=st.booleans(),
)
@settings(max_examples=100)
def test_any_payload_of_quantised_factors_decodes_to_finite_values_or_is_refused(
    plan: str, group: int, shape: tuple[int, int], seed: int, tame: bool
) -> None:
    params = LORA.normalise({"rank": 4, "factors": plan, "factor_group_size": group}, shape)
    payload = random_payload(LORA.payload_spec(shape, params), seed, tame)
    try:
        LORA.check(payload, shape, params)
    except CodecError:
        return
    assert bool(torch.isfinite(LORA.decode(payload, shape, params)).all())
    assert math.isfinite(LORA.norm(payload, shape, params))


def test_a_broken_part_is_refused_with_the_factor_it_belongs_to() -> None:
    encoded, _ = quantised("ternary")
    with pytest.raises(CodecError, match="factor B: byte 255 does not encode five trits"):
        LORA.check(
            {**encoded.payload, "b0_codes": torch.full((4, 13), 255).byte()}, (64, 172), encoded.params
        )


def test_a_vector_has_no_factors() -> None:
    with pytest.raises(CodecError, match="not a matrix"):
        LORA.encode(torch.ones(64), rank=1)
