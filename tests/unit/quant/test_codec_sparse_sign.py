"""Codec sparse_sign: what it keeps, what that costs, and payloads that are refused."""

from __future__ import annotations

import math

import pytest
import torch
from gym_quant import CodecError
from gym_quant.codecs.sparse_sign import CHUNK, KEPT, SparseSign
from hypothesis import given, settings
from hypothesis import strategies as st

SPARSE = SparseSign()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def decoded(delta: torch.Tensor) -> torch.Tensor:
    shape = tuple(delta.shape)
    payload = SPARSE.encode(delta).payload
    SPARSE.check(payload, shape, {})
    return SPARSE.decode(payload, shape, {})


def test_a_chunk_takes_116_bytes_at_12_bits_per_index_and_2_bits_per_value() -> None:
    encoded = SPARSE.encode(noise(64, CHUNK))
    assert SPARSE.payload_bytes((64, CHUNK), encoded.params) == 64 * (KEPT * 14 // 8 + 4)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3 * CHUNK), st.integers(0, 1 << 20))
def test_the_largest_weights_of_each_chunk_keep_their_sign_and_the_others_are_zero(
    count: int, seed: int
) -> None:
    delta = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    found = decoded(delta)
    for true, got in zip(delta.split(CHUNK), found.split(CHUNK), strict=True):
        kept = math.ceil(len(true) * KEPT / CHUNK)
        largest = true.abs().topk(kept).indices
        assert set(got.nonzero().flatten().tolist()) == set(largest.tolist())
        assert torch.equal(got[largest].sign(), true[largest].sign())
        assert len(set(got[largest].abs().tolist())) <= 2


def test_two_magnitudes_are_told_apart() -> None:
    delta = torch.zeros(CHUNK)
    delta[5], delta[4000] = -4.0, 0.5
    delta[100:162] = 1.0
    found = decoded(delta)
    assert found[5] == -4.0
    assert float(found[100]) == pytest.approx(1.0, rel=0.02)
    assert float(found[4000]) == pytest.approx(1.0, rel=0.02)


def test_of_equal_weights_the_first_are_kept() -> None:
    found = decoded(torch.ones(2, CHUNK))
    assert torch.equal(found, torch.cat([torch.ones(2, KEPT), torch.zeros(2, CHUNK - KEPT)], 1))


def test_a_chunk_without_changes_decodes_to_zero_beside_one_with_changes() -> None:
    delta = noise(2, CHUNK)
    delta[1] = 0.0
    found = decoded(delta)
    assert int(found[0].count_nonzero()) == KEPT
    assert not found[1].any()


def test_the_split_has_the_least_error_of_all_splits() -> None:
    values = noise(CHUNK).abs().sort().values[-KEPT:].double()
    errors = [
        float((values[:at] - values[:at].mean()).square().sum())
        + float((values[at:] - values[at:].mean()).square().sum())
        for at in range(1, KEPT)
    ]
    delta = noise(CHUNK)
    kept = decoded(delta) != 0
    error = float((decoded(delta) - delta)[kept].double().square().sum())
    assert error == pytest.approx(min(errors), rel=0.01)


def test_an_index_that_is_not_above_the_one_before_it_is_refused() -> None:
    payload = SPARSE.encode(noise(CHUNK)).payload
    payload["indices"][3:6] = payload["indices"][0:3]
    with pytest.raises(CodecError, match=r"chunk 0: index \d+ is not above the one before it"):
        SPARSE.check(payload, (CHUNK,), {})


def test_an_index_beyond_the_last_chunk_is_refused() -> None:
    payload = SPARSE.encode(noise(100)).payload
    payload["indices"].fill_(255)
    with pytest.raises(CodecError, match="index 4095 is outside the last chunk"):
        SPARSE.check(payload, (100,), {})


@pytest.mark.parametrize(
    ("scale", "words"), [(-1.0, "scale is negative"), (float("nan"), "scale is not finite")]
)
def test_a_scale_that_is_negative_or_not_finite_is_refused(scale: float, words: str) -> None:
    payload = SPARSE.encode(noise(CHUNK)).payload
    payload["scales"][0, 1] = scale
    with pytest.raises(CodecError, match=words):
        SPARSE.check(payload, (CHUNK,), {})


def test_weights_that_did_not_change_stay_zero_when_fewer_than_kept_changed() -> None:
    delta = torch.zeros(CHUNK)
    delta[:20], delta[100:114] = 0.1, -1.0
    found = decoded(delta)
    assert torch.equal(found[100:114], torch.full((14,), -1.0))
    assert not found[delta == 0].any()


@pytest.mark.parametrize("field", ["indices", "codes"])
def test_unused_bits_that_are_not_zero_are_refused(field: str) -> None:
    payload = SPARSE.encode(noise(CHUNK + 1)).payload
    payload[field][-1] += 128
    with pytest.raises(CodecError, match=f"{field}: the unused bits of the last byte are not zero"):
        SPARSE.check(payload, (CHUNK + 1,), {})


def test_resident_rows_of_a_short_last_chunk_in_any_order_decode_as_all_rows_do() -> None:
    shape = (300, 72)
    payload, whole = SPARSE.encode(noise(*shape)).payload, decoded(noise(*shape))
    resident = SPARSE.resident(payload, shape, {}, torch.device("cpu"))
    rows = torch.tensor([299, 0, 56, 57, 299, 113])
    assert torch.equal(resident.decode_rows(rows), whole[rows])
    assert torch.equal(resident.decode_block(280, 300), whole[280:])
