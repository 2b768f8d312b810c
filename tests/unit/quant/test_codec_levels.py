"""int8, int4, int2, ternary and binary: against straight torch formulas, by hand, and by hypothesis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import CodecError, get_codec
from gym_quant.bitstream import pack_bits, pack_trits, unpack_bits, unpack_trits
from gym_quant.codec import as_matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

BITS = {"binary": 1, "int2": 2, "int4": 4, "int8": 8}
NAMES = ("binary", "int2", "int4", "int8", "ternary")

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=40)
deltas = hnp.arrays("float32", shapes, elements=st.floats(-(2.0**100), 2.0**100, width=32))
settings_of = st.fixed_dictionaries(
    {
        "symmetric": st.booleans(),
        "group_size": st.sampled_from([None, 1, 3, 8, 128]),
        "scale_dtype": st.sampled_from(["float32", "bfloat16"]),
    }
)


def codes_of(name: str, packed: torch.Tensor, cols: int) -> torch.Tensor:
    """Codes taken out of their bytes with nothing but torch integer arithmetic, ``[rows, cols]`` int64."""
    wide = packed.long()
    if name == "ternary":
        digits = [(wide // 3**i) % 3 for i in range(5)]
    else:
        digits = [(wide >> at) % (1 << BITS[name]) for at in range(0, 8, BITS[name])]
    return torch.stack(digits, dim=-1).reshape(packed.shape[0], -1)[:, :cols]


def formula(name: str, payload: dict[str, torch.Tensor], cols: int, params: dict[str, Any]) -> torch.Tensor:
    """The definition of every codec of the family, one line each, ``[rows, cols]`` float32."""
    codes = codes_of(name, payload["codes"], cols)
    group = int(params.get("group_size", cols))
    at = torch.arange(cols) // group

    def spread(field: str) -> torch.Tensor:
        numbers = payload[field].float()
        return numbers[:, at] if "group_size" in params else numbers.reshape(1, 1).expand(codes.shape)

    symmetric = params.get("symmetric", 1) == 1
    scale = spread("scales")
    if name == "ternary":
        negative = scale if symmetric else spread("negative_scales")
        return torch.where(codes == 0, -negative, torch.where(codes == 2, scale, 0.0 * scale))
    if name == "binary":
        signed: torch.Tensor = (2 * codes - 1).float() * scale
        return signed if symmetric else signed + spread("offsets")
    if symmetric:
        return torch.mul((codes - 2 ** (BITS[name] - 1)).float(), scale)
    return torch.add(codes.float() * scale, spread("offsets"))


@pytest.mark.parametrize("name", NAMES)
@given(array=deltas, params=settings_of)
@settings(max_examples=60)
def test_dequantised_values_are_those_of_the_formula_bit_for_bit(
    name: str, array: object, params: dict[str, Any]
) -> None:
    codec, delta = get_codec(name), torch.as_tensor(array)
    shape = tuple(delta.shape)
    encoded = codec.encode(delta, **params)
    wanted = formula(name, encoded.payload, as_matrix(shape)[1], encoded.params)
    decoded = codec.decode(encoded.payload, shape, encoded.params)
    assert torch.equal(decoded, wanted.reshape(shape))
    codec.check(encoded.payload, shape, encoded.params)
    norm = codec.norm(encoded.payload, shape, encoded.params)
    assert norm == pytest.approx(float(decoded.double().norm()), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@given(array=deltas, group=st.sampled_from([None, 3, 8, 128]))
@settings(max_examples=40)
def test_what_a_group_loses_is_never_more_than_its_energy(
    name: str, array: object, group: int | None
) -> None:
    codec, delta = get_codec(name), torch.as_tensor(array)
    encoded = codec.encode(delta, group_size=group)
    lost = codec.decode(encoded.payload, tuple(delta.shape), encoded.params).double() - delta.double()
    assert float(lost.square().sum()) <= float(delta.double().square().sum()) * (1 + 1e-5) + 1e-80


@given(array=deltas, group=st.sampled_from([None, 1, 8, 128]), symmetric=st.booleans())
def test_int8_is_off_by_at_most_half_a_step(array: object, group: int | None, symmetric: bool) -> None:
    codec, delta = get_codec("int8"), torch.as_tensor(array)
    encoded = codec.encode(delta, group_size=group, symmetric=symmetric)
    rows, cols = as_matrix(tuple(delta.shape))
    lost = (codec.decode(encoded.payload, tuple(delta.shape), encoded.params) - delta).abs()
    scale = encoded.payload["scales"]
    step = scale.repeat_interleave(group, 1)[:, :cols] if group is not None else scale.expand(rows, cols)
    slack = 1e-5 * float(delta.abs().max()) + 1e-37
    assert bool((lost.reshape(rows, cols) <= 0.5 * step + slack).all())


@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("ternary", True), ("binary", True)])
@given(array=deltas, group=st.sampled_from([None, 1, 8, 128]))
@settings(max_examples=60)
def test_encoding_what_was_decoded_changes_nothing(
    name: str, symmetric: bool, array: object, group: int | None
) -> None:
    codec, delta = get_codec(name), torch.as_tensor(array)
    shape = tuple(delta.shape)
    first = codec.encode(delta, group_size=group, symmetric=symmetric)
    once = codec.decode(first.payload, shape, first.params)
    second = codec.encode(once, group_size=group, symmetric=symmetric)
    again = codec.decode(second.payload, shape, second.params)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=1e-37)
    if name == "int8" and float(first.payload["scales"].min()) > 1e-30:
        assert torch.equal(first.payload["codes"], second.payload["codes"])


@pytest.mark.parametrize("name", ["int2", "int4", "int8", "ternary"])
@given(array=deltas, group=st.sampled_from([None, 3, 128]))
@settings(max_examples=30)
def test_zero_stays_zero_where_levels_are_symmetric(name: str, array: object, group: int | None) -> None:
    codec, delta = get_codec(name), torch.as_tensor(array)
    holes = torch.arange(delta.numel()).reshape(delta.shape) % 3 == 0
    delta = torch.where(holes, 0.0, delta)
    encoded = codec.encode(delta, group_size=group)
    assert not bool(codec.decode(encoded.payload, tuple(delta.shape), encoded.params)[holes].any())


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


@pytest.mark.parametrize("name", NAMES)
@given(
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=12),
    params=settings_of,
    seed=st.integers(0, 2**32),
    tame=st.booleans(),
)
@settings(max_examples=80)
def test_any_payload_decodes_to_finite_values_or_is_refused(
    name: str, shape: tuple[int, ...], params: dict[str, Any], seed: int, tame: bool
) -> None:
    codec = get_codec(name)
    kept = codec.normalise(params, shape)
    payload = random_payload(codec.payload_spec(shape, kept), seed, tame)
    try:
        codec.check(payload, shape, kept)
    except CodecError:
        return
    decoded = codec.decode(payload, shape, kept)
    assert tuple(decoded.shape) == shape
    assert bool(torch.isfinite(decoded).all())
    assert math.isfinite(codec.norm(payload, shape, kept))


@given(
    hnp.arrays("uint8", hnp.array_shapes(min_dims=2, max_dims=2, max_side=33)), st.sampled_from([1, 2, 4, 8])
)
def test_codes_come_back_from_their_bytes_and_padding_is_ignored(array: Any, bits: int) -> None:
    codes = array & ((1 << bits) - 1)
    packed = pack_bits(codes, bits)
    assert packed.shape == (codes.shape[0], math.ceil(codes.shape[1] * bits / 8))
    used = codes.shape[1] * bits % 8
    noisy = packed.copy()
    if used:
        noisy[:, -1] |= 256 - (1 << used)
    for stored in (packed, noisy):
        assert np.array_equal(unpack_bits(stored, bits, codes.shape[1]), codes)
    trits = array % 3
    assert np.array_equal(unpack_trits(pack_trits(trits), codes.shape[1]), trits)


def test_the_order_of_codes_in_a_byte_is_least_significant_first() -> None:
    assert pack_bits(np.array([[1, 2, 3]], np.uint8), 4).tolist() == [[0x21, 0x03]]
    assert pack_bits(np.array([[1, 2, 3, 0, 1]], np.uint8), 2).tolist() == [[0b00111001, 0b01]]
    assert pack_trits(np.array([[1, 2, 0, 0, 2, 2]], np.uint8)).tolist() == [[1 + 6 + 2 * 81, 2]]


def test_int4_by_hand() -> None:
    delta = torch.tensor([[-8.0, 7.0, 0.0, 3.0, -1.0]])
    encoded = get_codec("int4").encode(delta)
    assert encoded.payload["scales"].tolist() == [1.0]
    assert encoded.payload["codes"].tolist() == [[0xF0, 0xB8, 0x07]]


def test_the_ternary_threshold_is_the_best_of_all_and_beats_seven_tenths_of_the_mean() -> None:
    codec = get_codec("ternary")
    delta = torch.randn(1, 200, generator=torch.Generator().manual_seed(3)) ** 3

    def lost(kept: torch.Tensor) -> float:
        scale = delta[kept].abs().mean()
        return float((delta - torch.where(kept, delta.sign() * scale, 0.0)).square().sum())

    encoded = codec.encode(delta)
    found = float((codec.decode(encoded.payload, (1, 200), {}) - delta).square().sum())
    every = [lost(delta.abs() >= threshold) for threshold in delta.abs().flatten()]
    assert found == pytest.approx(min(every), rel=1e-5)
    assert found < lost(delta.abs() > 0.7 * delta.abs().mean())


def test_the_two_levels_of_an_asymmetric_binary_are_the_best_of_all_splits() -> None:
    delta = torch.randn(1, 60, generator=torch.Generator().manual_seed(4)).exp()
    encoded = get_codec("binary").encode(delta, symmetric=False)
    found = get_codec("binary").decode(encoded.payload, (1, 60), encoded.params)
    ordered = delta.flatten().sort().values
    every = [
        float(sum((part - part.mean()).square().sum() for part in (ordered[:at], ordered[at:])))
        for at in range(1, 60)
    ]
    assert float((found - delta).square().sum()) == pytest.approx(min(every), rel=1e-5)


@pytest.mark.parametrize("name", ["int2", "int4"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_clip_search_beats_the_plain_maximum_by_far(name: str, symmetric: bool) -> None:
    delta = torch.randn(8, 512, generator=torch.Generator().manual_seed(5))
    delta[:, 7] *= 10
    codec = get_codec(name)
    encoded = codec.encode(delta, group_size=512, symmetric=symmetric)
    error = (codec.decode(encoded.payload, (8, 512), encoded.params) - delta).square().sum()
    reach = delta.abs().amax(1, keepdim=True)
    levels = 2 ** (BITS[name] - 1) - 1
    plain = (delta / reach * levels).round() * reach / levels
    assert error < 0.6 * (plain - delta).square().sum()


def test_more_bits_lose_less_and_finer_groups_do_too() -> None:
    delta = torch.randn(64, 512, generator=torch.Generator().manual_seed(6)) * torch.linspace(0.1, 2, 512)

    def lost(name: str, **params: Any) -> float:
        encoded = get_codec(name).encode(delta, **params)
        return float((get_codec(name).decode(encoded.payload, (64, 512), encoded.params) - delta).norm())

    errors = [lost(name, group_size=128) for name in ("binary", "ternary", "int2", "int4", "int8")]
    assert errors == sorted(errors, reverse=True)
    for name in NAMES:
        assert lost(name, group_size=64) < lost(name, group_size=512) < lost(name)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_the_number_of_threads(name: str) -> None:
    delta = torch.randn(97, 1031, generator=torch.Generator().manual_seed(7))
    before, payloads = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            payloads.append(get_codec(name).encode(delta, symmetric=False, group_size=100).payload)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(payloads[0][field], payloads[1][field]) for field in payloads[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_of_a_tensor_with_millions_of_weights_is_found_on_a_sample(name: str) -> None:
    delta = torch.randn(1100, 1024, generator=torch.Generator().manual_seed(8))
    codec = get_codec(name)
    rows, whole = codec.encode(delta, group_size=1024), codec.encode(delta)
    errors = [
        float((codec.decode(e.payload, (1100, 1024), e.params) - delta).square().mean())
        for e in (rows, whole)
    ]
    assert errors[1] < (4.0 if name == "int8" else 1.1) * errors[0]


@pytest.mark.parametrize("name", NAMES)
def test_importance_moves_the_error_to_columns_that_do_not_count(name: str) -> None:
    generator = torch.Generator().manual_seed(9)
    delta = torch.randn(32, 256, generator=generator)
    weights = torch.rand(256, generator=generator) ** 4
    codec = get_codec(name)
    plain = codec.encode(delta, group_size=256, symmetric=False)
    weighed = codec.encode(delta, importance=weights, group_size=256, symmetric=False)

    def counted(encoded: Any) -> float:
        decoded = codec.decode(encoded.payload, (32, 256), encoded.params)
        return float(((decoded - delta).square() * weights).sum())

    assert counted(weighed) <= counted(plain) if name == "int8" else counted(weighed) < counted(plain)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (torch.ones(7), r"shape \[7\], not \[8\] or \[8, 8\]"),
        (-torch.ones(8), "importance is negative"),
        (torch.full((8,), float("nan")), "importance is not finite"),
    ],
)
def test_an_importance_that_does_not_fit_is_refused(importance: torch.Tensor, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        get_codec("int4").encode(torch.ones(4, 8), importance=importance)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"symmetric": 2}, "symmetric is 2"),
        ({"symmetric": "no"}, "symmetric is 'no'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"scale_dtype": "float16"}, "scale_dtype is 'float16'"),
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        get_codec("int2").encode(torch.ones(4, 8), **params)


def test_negative_scales_impossible_trits_and_overflowing_grids_are_refused() -> None:
    ternary, int8 = get_codec("ternary"), get_codec("int8")
    good = ternary.encode(torch.ones(2, 5), symmetric=False)
    for field, value in (("scales", -1.0), ("negative_scales", -1.0)):
        with pytest.raises(CodecError, match=r"scale is negative: -1\.0"):
            ternary.check({**good.payload, field: torch.tensor([value])}, (2, 5), good.params)
    codes = torch.tensor([[0], [243]], dtype=torch.uint8)
    with pytest.raises(CodecError, match="byte 243 does not encode five trits"):
        ternary.check({**good.payload, "codes": codes}, (2, 5), good.params)
    fine = int8.encode(torch.ones(2, 5))
    with pytest.raises(CodecError, match="overflows float32"):
        int8.check({**fine.payload, "scales": torch.tensor([1e37])}, (2, 5), fine.params)
