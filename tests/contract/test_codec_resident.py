"""What every codec keeps in memory for serving: packed to 8 bits per weight, and the same numbers as it decodes to.

A codec that is dropped into gym_quant/codecs is tested here by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from gym_quant import codec_names, get_codec, resident
from gym_quant.bitstream import Bytes, Floats
from gym_quant.codec import Encoded
from gym_quant.factor_encoding import payload_size
from gym_quant.kernels import ResidentSigns
from gym_quant.levels import LevelCodec, Shared
from gym_quant.registry import CODECS
from gym_quant.resident import Resident, Transposed
from gym_quant.resident_codes import codes_a_byte, from_planes, to_planes
from gym_quant.uniform import UniformCodec

from tests.support.codec_settings import GROUPS, settings_of

CPU = torch.device("cpu")
ROWS, COLS = 600, 44
MLP = (576, 1536)
"""A matrix of SmolLM2-135M's MLP."""

CASES = [(name, params) for name in codec_names() for params in settings_of(name)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows, so that there are several."""
    monkeypatch.setattr(resident, "_BLOCK", 64 * COLS)


@functools.cache
def _encoded(name: str, params: tuple[tuple[str, Any], ...]) -> tuple[Encoded, torch.Tensor]:
    delta = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0)) * 0.01
    made = get_codec(name).encode(delta, **dict(params))
    return made, get_codec(name).decode(made.payload, (ROWS, COLS), made.params)


def encoded(name: str, params: dict[str, Any]) -> tuple[Encoded, torch.Tensor]:
    """A delta in a payload of its own, and decoded."""
    made, whole = _encoded(name, tuple(params.items()))
    return Encoded(made.params, {field: t.clone() for field, t in made.payload.items()}), whole


def packed(name: str, params: dict[str, Any]) -> tuple[Resident, torch.Tensor]:
    """A delta as it is kept and as it decodes; of a form that is not packed the test is skipped."""
    made, whole = encoded(name, params)
    held = get_codec(name).resident(made.payload, (ROWS, COLS), made.params, CPU)
    for field in made.payload.values():
        field.zero_()  # what is kept must view nothing of the payload
    if held is None:
        pytest.skip("decoded once, as dense")
    return held, whole


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_rows_blocks_and_products_are_those_of_the_decoded_delta(name: str, params: dict[str, Any]) -> None:
    held, whole = packed(name, params)
    close = {"rtol": 1e-5, "atol": 1e-7}
    some = torch.tensor([599, 0, 64, 63, 0])
    assert (held.rows, held.cols) == (ROWS, COLS)
    assert torch.allclose(held.decode_rows(some), whole[some], **close)
    assert torch.allclose(held.decode_block(512, 600), whole[512:], **close)
    assert float(whole.abs().max()) <= held.largest() * 1.0001
    x, y = torch.randn(9, COLS), torch.randn(9, ROWS)
    wanted = y + x @ whole.T
    held.add(x, y)
    assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_a_batch_adds_to_every_row_its_own_variant_and_nothing_to_the_base_s(
    name: str, params: dict[str, Any]
) -> None:
    held, whole = packed(name, params)
    other, second = packed(name, params)
    x, y = torch.randn(7, COLS), torch.randn(7, ROWS)
    index = np.array([0, 1, -1, 1, 0, -1, 1])
    before, wanted = y.clone(), y + x @ whole.T
    wanted[[2, 5]] = y[[2, 5]]
    assert torch.equal(whole, second)
    type(held).batch([held, other], "exact").add(x, index, y)
    assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[[2, 5]], before[[2, 5]])


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_a_transposed_delta_is_multiplied_without_being_decoded_whole(
    name: str, params: dict[str, Any]
) -> None:
    held, whole = packed(name, params)
    turned = Transposed(held)
    x, y = torch.randn(5, ROWS), torch.zeros(5, COLS)
    turned.add(x, y)
    assert torch.allclose(y, x @ whole, rtol=1e-5, atol=1e-5)
    assert torch.allclose(turned.decode_block(0, 30), whole.T[:30], atol=1e-7)
    assert torch.allclose(turned.decode_rows(torch.tensor([3, 1])), whole.T[[3, 1]], atol=1e-7)
    assert turned.nbytes == held.nbytes


@pytest.mark.parametrize(("name", "params"), CASES, ids=str)
def test_a_codec_of_at_most_8_bits_per_weight_takes_the_bytes_of_its_codes_and_scales(
    name: str, params: dict[str, Any]
) -> None:
    codec = get_codec(name)
    if codec.payload_bytes(MLP, codec.normalise(settings_of(name)[0], MLP)) > 1.01 * MLP[0] * MLP[1]:
        pytest.skip("more than 8 bits per weight")
    kept = codec.normalise(params, MLP)
    payload = {
        field: torch.ones(shape, dtype=d) for field, (d, shape) in codec.payload_spec(MLP, kept).items()
    }
    held = codec.resident(payload, MLP, kept, CPU)
    assert held is not None
    if isinstance(held, ResidentSigns):  # whose kernels read float32 scales, one a row at least
        payload = {field: t.float() if t.is_floating_point() else t for field, t in payload.items()}
        assert held.nbytes <= 1.1 * payload_size(payload)
    else:
        assert held.nbytes == payload_size(payload)


@pytest.mark.parametrize("name", [n for n in codec_names() if issubclass(CODECS.type_of(n), LevelCodec)])
def test_codes_in_planes_decode_to_the_bits_that_the_file_s_codes_decode_to(name: str) -> None:
    for params in settings_of(name):
        held, whole = packed(name, params)
        assert torch.equal(held.decode_block(0, ROWS), whole), params


@pytest.mark.parametrize("levels", [2, 3, 4, 5, 6, 16, 200, 256])
def test_planes_give_back_every_code(levels: int) -> None:
    for cols in (1, 7, 40):
        codes = np.random.default_rng(cols).integers(0, levels, (9, cols), dtype=np.uint8)
        packed = to_planes(codes, levels)
        assert packed.shape[1] == -(-cols // codes_a_byte(levels))
        assert (from_planes(torch.from_numpy(packed), levels, cols).numpy() == codes).all()


class Uneven(UniformCodec):
    """Levels that are not evenly spaced, and offsets that count twice: of a package of another author."""

    name = "uneven"

    def dequantise(self, codes: Bytes, shared: Shared, symmetric: bool) -> Floats:
        values = (np.arange(self.levels, dtype=np.float32) - 1) ** 2
        grid = values[codes] * shared[0]
        return grid if symmetric else grid + np.float32(2.0) * shared[1]


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("params", GROUPS, ids=str)
def test_levels_that_are_not_evenly_spaced_decode_to_the_same_bits(
    params: dict[str, Any], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uneven, "bits", bits, raising=False)
    codec, delta = Uneven(), torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    for symmetric in (True, False):
        made = codec.encode(delta, symmetric=symmetric, **params)
        held = codec.resident(made.payload, (ROWS, COLS), made.params, CPU)
        assert held is not None
        whole = codec.decode(made.payload, (ROWS, COLS), made.params)
        assert torch.equal(held.decode_block(0, ROWS), whole)


@pytest.mark.parametrize("params", GROUPS, ids=str)
def test_symmetric_binary_is_kept_as_bitdelta_is(params: dict[str, Any]) -> None:
    held = []
    for name in ("binary", "bitdelta"):
        made, _ = encoded(name, params)
        held.append(get_codec(name).resident(made.payload, (ROWS, COLS), made.params, CPU))
    binary, bitdelta = held
    assert isinstance(binary, ResidentSigns)
    assert isinstance(bitdelta, ResidentSigns)
    assert binary.nbytes == bitdelta.nbytes
    assert torch.equal(binary.decode_block(0, ROWS), bitdelta.decode_block(0, ROWS))
