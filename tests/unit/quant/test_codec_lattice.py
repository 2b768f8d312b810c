"""Codec lattice: sizes near the entropy, steps that only become finer, and payloads that are refused."""

from __future__ import annotations

import math
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from gym_quant import CodecError
from gym_quant.codecs.lattice import STEP_IN_RMS, Lattice
from hypothesis import given, settings
from hypothesis import strategies as st

LATTICE = Lattice()


def noise(*shape: int, scale: float = 1e-3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


def entropy_bytes(codes: torch.Tensor) -> float:
    counts = np.unique(codes.numpy(), return_counts=True)[1]
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum() * codes.numel() / 8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-300, 300), min_size=1, max_size=70),
    st.integers(0, 24),
    st.integers(-126, 60),
)
def test_integers_come_back_as_they_were_written(codes: list[int], shift: int, exponent: int) -> None:
    wanted = torch.tensor(codes, dtype=torch.int64) << shift
    wanted = wanted.clamp(-(2**31) + 1, 2**31 - 1)
    encoded = LATTICE.encode_integers(wanted, exponent)
    LATTICE.check(encoded.payload, (len(codes),), encoded.params)
    found = LATTICE.integers(encoded.payload, (len(codes),), encoded.params)
    assert found is not None
    assert torch.equal(found.codes.to(torch.int64), wanted)
    assert found.exponent == exponent


@pytest.mark.parametrize("scale", [1.0, 1.3, 1.7])
def test_a_matrix_of_noise_takes_at_most_four_per_cent_more_than_its_entropy(scale: float) -> None:
    delta = noise(576, 576, scale=1e-3 * scale)
    encoded = LATTICE.encode(delta)
    found = LATTICE.integers(encoded.payload, (576, 576), encoded.params)
    assert found is not None
    size = LATTICE.payload_bytes((576, 576), encoded.params)
    assert size <= 1.04 * entropy_bytes(found.codes)
    assert size <= LATTICE.payload_bytes((576, 576), LATTICE.parameters({}, (576, 576))[0])


def test_the_step_is_the_power_of_two_nearest_to_its_share_of_the_rms() -> None:
    for scale in np.geomspace(1e-4, 1e-2, 23):
        delta = noise(64, 64, scale=float(scale))
        rms = float(delta.double().square().mean().sqrt())
        assert abs(LATTICE.exponent_of(delta) - math.log2(STEP_IN_RMS * rms)) <= 0.5


def test_the_step_stays_until_deltas_have_halved_or_are_four_times_as_large() -> None:
    delta = noise(64, 64)
    first = LATTICE.exponent_of(delta)
    assert LATTICE.exponent_of(delta * 2, first) == first
    assert LATTICE.exponent_of(delta * 16, first) == LATTICE.exponent_of(delta * 16)
    assert LATTICE.exponent_of(delta * 0.75, first) == first
    assert LATTICE.exponent_of(delta / 4, first) < first
    exponent = LATTICE.exponent_of(delta / 1024, first)
    rms = float((delta / 1024).double().square().mean().sqrt())
    assert rms * STEP_IN_RMS <= 2.0**exponent < 2 * rms * STEP_IN_RMS


def test_a_delta_of_one_value_is_not_lost() -> None:
    for value in (0.7, 1.0, 1.01, 1.3, -1.9):
        encoded = LATTICE.encode(torch.tensor([value]))
        assert float(LATTICE.decode(encoded.payload, (1,), encoded.params)) != 0.0


def test_a_scaled_delta_has_no_integers_unless_it_is_scaled_by_a_power_of_two() -> None:
    encoded = LATTICE.encode(noise(8, 8))
    halved = LATTICE.scaled(encoded.payload, (8, 8), encoded.params, 0.5)
    assert LATTICE.integers(halved, (8, 8), encoded.params) is not None
    other = LATTICE.scaled(encoded.payload, (8, 8), encoded.params, 0.3)
    assert LATTICE.integers(other, (8, 8), encoded.params) is None


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


BOMB = bytes([0x81, 0, 255]) + deflated(bytes(50_000_000))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (BOMB, "do not inflate to exactly 64 bytes"),
        (bytes([0x81, 0, 255]) + deflated(bytes(63)), "take 63 bytes instead of 64"),
        (bytes([0x81, 0, 255]) + deflated(bytes(64)) + b"more", "do not inflate to exactly 64 bytes"),
        (bytes([0x81, 0, 255]) + deflated(bytes(64))[:-1], "do not inflate to exactly 64 bytes"),
        (bytes([0x81, 0, 255]) + b"\xff" * 9, "not a deflate stream"),
        (bytes([1, 0, 255]) + bytes(65), "take 65 bytes instead of 64"),
        (bytes([1, 0, 2]) + bytes(63) + b"\x03", "a byte of 1 codes is 3, too large for 3 levels"),
        (bytes([9, 0, 1]) + bytes(64), "9 values per byte"),
        (bytes([0x80]), "truncated"),
        (bytes([15]) + (2**31 - 1).to_bytes(4, "little") + b"\xff" * 256, "exceeds 2147483647"),
    ],
)
def test_codes_that_are_not_those_of_the_shape_are_refused(codes: bytes, message: str) -> None:
    payload = {"scales": torch.ones(1), "codes": torch.tensor(list(codes), dtype=torch.uint8)}
    with pytest.raises(CodecError, match=message):
        LATTICE.check(payload, (8, 8), {"bytes": len(codes)})


def test_a_check_takes_the_memory_of_the_packed_codes() -> None:
    codes = bytes([0x8F, 0, 0, 0, 0]) + deflated(bytes(4_000_000))
    payload = {"scales": torch.ones(1), "codes": torch.tensor(list(codes), dtype=torch.uint8)}
    tracemalloc.start()
    LATTICE.check(payload, (1000, 1000), {"bytes": len(codes)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize(
    ("scale", "message"), [(-1.0, "negative"), (math.inf, "not finite"), (1e38, "largest")]
)
def test_steps_that_give_no_finite_values_are_refused(scale: float, message: str) -> None:
    encoded = LATTICE.encode_integers(torch.tensor([7, -1]), 0)
    payload = {**encoded.payload, "scales": torch.tensor([scale])}
    with pytest.raises(CodecError, match=message):
        LATTICE.check(payload, (2,), encoded.params)


def test_sizes_beyond_four_bytes_a_weight_and_values_beyond_the_grid_are_refused() -> None:
    with pytest.raises(CodecError, match="bytes is 100"):
        LATTICE.normalise({"bytes": 100}, (2, 2))
    with pytest.raises(CodecError, match="2\\*\\*31 steps"):
        LATTICE.encode(torch.tensor([1.0]), exponent=-40)
    with pytest.raises(CodecError, match="not within"):
        LATTICE.encode_integers(torch.tensor([1]), -127)
