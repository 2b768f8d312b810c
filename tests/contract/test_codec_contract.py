"""What every member of the codec registry must do; a codec dropped into gym_quant/codecs is tested here by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gym_quant import CodecError, codec_names, get_codec
from gym_quant.codec import as_matrix
from gym_quant.kernels import decode_signs

LEVELS: list[dict[str, Any]] = [
    {},
    {"group_size": 128},
    {"symmetric": False, "group_size": 1024, "scale_dtype": "bfloat16"},
    {"symmetric": False},
]
PARAMS: dict[str, list[dict[str, Any]]] = {
    "bitdelta": [{}, {"group_size": 128}, {"group_size": 8, "scale_dtype": "bfloat16"}],
    "dense": [{}, {"dtype": "float32"}],
    **{name: LEVELS for name in ("binary", "int2", "int4", "int8", "ternary")},
    "lora": [
        {"rank": 3},
        {"rank": 3, "scaling": 0.5},
        {"rank": 3, "scaling": 0.3, "factors": "float32"},
        {"rank": 3, "factors": "int4"},
        {"rank": 3, "factors": "int8*1,int2*2"},
    ],
}
"""Settings to try; a codec that is not listed is tried with its defaults."""

SHAPES = [(172,), (), (64, 172), (3, 7), (2, 3, 40)]
CASES = [(name, params) for name in codec_names() for params in PARAMS.get(name, [{}])]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param  # type: ignore[no-any-return]


def shapes_for(name: str) -> list[tuple[int, ...]]:
    return [shape for shape in SHAPES if name != "lora" or min(as_matrix(shape)) >= 3]


def delta_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.01


def test_the_payload_is_exactly_what_its_spec_says(case: tuple[str, dict[str, Any]]) -> None:
    codec = get_codec(case[0])
    for shape in shapes_for(case[0]):
        encoded = codec.encode(delta_of(shape), **case[1])
        described = {key: (field.dtype, tuple(field.shape)) for key, field in encoded.payload.items()}
        assert described == codec.payload_spec(shape, encoded.params)
        size = sum(field.numel() * field.element_size() for field in encoded.payload.values())
        assert size == codec.payload_bytes(shape, encoded.params)


def test_decoding_gives_float32_of_the_shape_nearer_to_the_delta_than_zero_is(
    case: tuple[str, dict[str, Any]],
) -> None:
    codec = get_codec(case[0])
    for shape in shapes_for(case[0]):
        delta = delta_of(shape)
        encoded = codec.encode(delta, **case[1])
        decoded = codec.decode(encoded.payload, shape, encoded.params)
        assert decoded.dtype == torch.float32
        assert tuple(decoded.shape) == shape
        assert (decoded - delta).norm() < delta.norm()


def test_rows_decode_alone_as_they_do_in_the_whole(case: tuple[str, dict[str, Any]]) -> None:
    codec = get_codec(case[0])
    shape = (64, 172)
    encoded = codec.encode(delta_of(shape), **case[1])
    whole = codec.decode(encoded.payload, shape, encoded.params)
    parts = [
        codec.decode_rows(encoded.payload, shape, encoded.params, at, at + 16) for at in range(0, 64, 16)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_the_norm_is_that_of_the_decoded_delta(case: tuple[str, dict[str, Any]]) -> None:
    codec = get_codec(case[0])
    for shape in shapes_for(case[0]):
        encoded = codec.encode(delta_of(shape), **case[1])
        decoded = codec.decode(encoded.payload, shape, encoded.params)
        norm = codec.norm(encoded.payload, shape, encoded.params)
        assert norm == pytest.approx(float(decoded.double().norm()), rel=1e-6)


@pytest.mark.parametrize("factor", [2.0**-7, 0.3, 1.0, 1.375])
def test_a_scaled_payload_decodes_to_the_scaled_delta_and_has_its_norm(
    case: tuple[str, dict[str, Any]], factor: float
) -> None:
    codec = get_codec(case[0])
    for shape in shapes_for(case[0]):
        encoded = codec.encode(delta_of(shape), **case[1])
        before = {key: field.clone() for key, field in encoded.payload.items()}
        found = codec.scaled(encoded.payload, shape, encoded.params, factor)
        assert all(torch.equal(before[key], field) for key, field in encoded.payload.items())
        described = {key: (field.dtype, tuple(field.shape)) for key, field in found.items()}
        assert described == codec.payload_spec(shape, encoded.params)
        codec.check(found, shape, encoded.params)
        wanted = codec.decode(encoded.payload, shape, encoded.params).double() * factor
        rounding = 2.0**-5 if torch.bfloat16 in {field.dtype for field in found.values()} else 2.0**-20
        assert float((codec.decode(found, shape, encoded.params) - wanted).norm()) <= rounding * wanted.norm()
        assert codec.norm(found, shape, encoded.params) == pytest.approx(float(wanted.norm()), rel=rounding)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_delta_is_scaled_by_nothing_but_finite_numbers_above_zero(
    case: tuple[str, dict[str, Any]], factor: float
) -> None:
    codec = get_codec(case[0])
    encoded = codec.encode(delta_of((64, 172)), **case[1])
    with pytest.raises(CodecError, match="finite number above 0"):
        codec.scaled(encoded.payload, (64, 172), encoded.params, factor)


def test_scales_that_overflow_their_number_format_are_refused(case: tuple[str, dict[str, Any]]) -> None:
    codec = get_codec(case[0])
    encoded = codec.encode(delta_of((64, 172)) * 1e30, **case[1])
    with pytest.raises(CodecError):
        codec.scaled(encoded.payload, (64, 172), encoded.params, 1e38)


def test_parameters_that_scale_a_delta_alone_leave_its_payload(case: tuple[str, dict[str, Any]]) -> None:
    codec, shape = get_codec(case[0]), (64, 172)
    encoded = codec.encode(delta_of(shape), **case[1])
    params = codec.scaled_params(encoded.params, 0.3)
    if params is not None:
        assert codec.normalise(params, shape) == params
        wanted = codec.decode(encoded.payload, shape, encoded.params) * 0.3
        torch.testing.assert_close(codec.decode(encoded.payload, shape, params), wanted)


def test_the_form_that_a_merge_reads_is_what_the_codec_gives(case: tuple[str, dict[str, Any]]) -> None:
    codec, shape = get_codec(case[0]), (64, 172)
    encoded = codec.encode(delta_of(shape), **case[1])
    form = codec.merge_form(shape, encoded.params)
    decoded = codec.decode(encoded.payload, shape, encoded.params)
    signs = codec.signs(encoded.payload, shape, encoded.params)
    factors = codec.factors(encoded.payload, shape, encoded.params)
    assert (form.kind == "signs") == (signs is not None)
    assert (form.kind == "factors") == (factors is not None) == (codec.rank(encoded.params) is not None)
    if signs is not None:
        assert signs.group_size == form.group_size
    if factors is not None:
        a, b = factors
        assert a.shape[0] == codec.rank(encoded.params)
        product = codec.scaling(encoded.params) * (b.double() @ a.double())
        torch.testing.assert_close(product.float(), decoded)


def test_encoding_twice_gives_the_same_bytes_and_leaves_the_delta_alone(
    case: tuple[str, dict[str, Any]],
) -> None:
    codec = get_codec(case[0])
    delta = delta_of((64, 172))
    before = delta.clone()
    first, second = codec.encode(delta, **case[1]), codec.encode(delta, **case[1])
    assert torch.equal(delta, before)
    assert all(torch.equal(first.payload[key], second.payload[key]) for key in first.payload)


def test_parameters_come_back_in_a_form_that_is_its_own_normal_form(case: tuple[str, dict[str, Any]]) -> None:
    codec = get_codec(case[0])
    encoded = codec.encode(delta_of((64, 172)), **case[1])
    assert codec.normalise(encoded.params, (64, 172)) == encoded.params


def test_half_precision_deltas_are_taken(case: tuple[str, dict[str, Any]]) -> None:
    codec = get_codec(case[0])
    delta = delta_of((64, 172)).to(torch.bfloat16)
    encoded = codec.encode(delta, **case[1])
    same = codec.encode(delta.float(), **case[1])
    assert all(torch.equal(encoded.payload[key], same.payload[key]) for key in same.payload)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(case: tuple[str, dict[str, Any]], bad: float) -> None:
    delta = delta_of((64, 172))
    delta[5, 7] = bad
    with pytest.raises(CodecError, match=r"not finite.* at flat index 867"):
        get_codec(case[0]).encode(delta, **case[1])


def test_an_empty_tensor_is_refused(case: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(CodecError):
        get_codec(case[0]).encode(torch.zeros(0, 8), **case[1])


def test_unknown_parameters_are_refused_by_name(case: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(CodecError, match="'colour'"):
        get_codec(case[0]).encode(delta_of((64, 172)), **case[1], colour="red")


def test_the_check_passes_what_was_encoded_and_finds_what_is_not_finite(
    case: tuple[str, dict[str, Any]],
) -> None:
    codec = get_codec(case[0])
    encoded = codec.encode(delta_of((64, 172)), **case[1])
    codec.check(encoded.payload, (64, 172), encoded.params)
    for key, field in encoded.payload.items():
        if field.is_floating_point():
            broken = {**encoded.payload, key: field.clone()}
            broken[key].reshape(-1)[-1] = float("nan")
            with pytest.raises(CodecError, match="not finite"):
                codec.check(broken, (64, 172), encoded.params)


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CodecError, match=r"unknown codec 'zip'.*bitdelta.*dense.*lora"):
        get_codec("zip")


def test_signs_where_a_codec_has_them_are_exactly_the_decoded_delta(case: tuple[str, dict[str, Any]]) -> None:
    codec, shape = get_codec(case[0]), (64, 172)
    encoded = codec.encode(delta_of(shape), **case[1])
    signs = codec.signs(encoded.payload, shape, encoded.params)
    if signs is None:
        decoded = codec.decode(encoded.payload, shape, encoded.params)
        assert len({float(v) for v in decoded[0].abs()}) > 1  # one scale with signs would have one magnitude
        return
    decoded = decode_signs(signs.bits, signs.scales, 172, signs.group_size)
    assert torch.equal(decoded, codec.decode(encoded.payload, shape, encoded.params))
