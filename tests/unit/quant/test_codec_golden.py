"""Golden files of the grids, of quantised factors and of those in float32: bytes and values of format version 1."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from gym_quant import Encoded, Payload, get_codec
from gym_quant.codecs.lora import Lora
from gym_quant.factor_encoding import decode_factor, encode_factor

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("binary", "int2", "int4", "int8", "ternary")
SHAPES: dict[str, tuple[int, ...]] = {
    **{f"{name}.tensor": (3, 13) for name in NAMES},
    **{f"{name}.groups": (3, 37) for name in NAMES},
    "factors": (9, 14),
}
SPEC = BaseSpec("golden-base", "sha256:" + hashlib.sha256(b"golden").hexdigest(), SHAPES)
PARTS = (("int8", 1), ("int4", 1), ("int2", 1), ("ternary", 2))
GROUP = 8


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that every machine computes alike: small fractions with a power of two below them."""
    count = torch.Size(shape).numel()
    first = sum(name.encode())
    return ((torch.arange(first, first + count) * 37 % 101 - 50) / 256).reshape(shape)


def factor_fields() -> Payload:
    a, b = numbers("a", (5, 14)), numbers("b", (5, 9))
    return {**encode_factor(a, PARTS, GROUP, "a"), **encode_factor(b, PARTS, GROUP, "b")}


def exact() -> Encoded:
    a, b = numbers("a", (2, 14)) / 3, numbers("b", (9, 2)) / 7
    return Lora().encode_factors(a, b, 0.5, factors="float32")


def write_golden(folder: Path) -> None:
    grids = [
        *(DeltaEntry.of(f"{n}.tensor", numbers(n, (3, 13)), n) for n in NAMES),
        *(
            DeltaEntry.of(
                f"{n}.groups", numbers(n, (3, 37)), n, group_size=16, symmetric=False, scale_dtype="bfloat16"
            )
            for n in NAMES
        ),
    ]
    write_delta(folder / "grids.gymdelta", grids, SPEC)
    plan = {"rank": 5, "factors": "int8*1,int4*1,int2*1,ternary*2", "factor_group_size": GROUP}
    params = get_codec("lora").normalise(plan, (9, 14))
    write_delta(
        folder / "factors.gymdelta", [DeltaEntry("factors", (9, 14), "lora", params, factor_fields)], SPEC
    )
    plain = DeltaEntry("factors", (9, 14), "lora", exact().params, lambda: exact().payload)
    write_delta(folder / "factors32.gymdelta", [plain], SPEC)


@pytest.mark.parametrize("kind", ["grids", "factors", "factors32"])
def test_the_writer_still_makes_the_golden_bytes(kind: str, tmp_path: Path) -> None:
    write_golden(tmp_path)
    assert (tmp_path / f"{kind}.gymdelta").read_bytes() == (GOLDEN / f"{kind}.gymdelta").read_bytes()


def test_the_golden_int4_codes_are_the_low_half_first_and_eight_is_zero() -> None:
    with DeltaFile.open(GOLDEN / "grids.gymdelta", SPEC) as delta:
        payload = delta.payload("int4.tensor")
        codes = torch.stack([payload["codes"] & 15, payload["codes"] >> 4], -1).reshape(3, -1)[:, :13]
        wanted = (codes.float() - 8) * payload["scales"]
        assert torch.equal(delta.decode("int4.tensor"), wanted)


def test_the_golden_trits_are_five_a_byte_and_negative_weights_have_their_own_scale() -> None:
    with DeltaFile.open(GOLDEN / "grids.gymdelta", SPEC) as delta:
        payload = delta.payload("ternary.groups")
        trits = torch.stack([payload["codes"].long() // 3**i % 3 for i in range(5)], -1).reshape(3, -1)[
            :, :37
        ]
        up = payload["scales"].float().repeat_interleave(16, 1)[:, :37]
        down = payload["negative_scales"].float().repeat_interleave(16, 1)[:, :37]
        wanted = torch.where(trits == 2, up, torch.where(trits == 0, -down, 0.0))
        assert torch.equal(delta.decode("ternary.groups"), wanted)


def test_the_golden_factors_are_the_product_of_the_decoded_ones() -> None:
    with DeltaFile.open(GOLDEN / "factors.gymdelta", SPEC) as delta:
        a, b = (
            decode_factor(factor_fields(), PARTS, width, GROUP, factor)
            for factor, width in (("a", 14), ("b", 9))
        )
        assert torch.equal(delta.decode("factors"), (b.double().T @ a.double()).float())


def test_the_golden_float32_factors_are_kept_as_they_are_and_multiplied_in_float64() -> None:
    with DeltaFile.open(GOLDEN / "factors32.gymdelta", SPEC) as delta:
        assert delta.record("factors").params == {"factors": "float32", "rank": 2, "scaling": 0.5}
        payload = delta.payload("factors")
        assert torch.equal(payload["a"], numbers("a", (2, 14)) / 3)
        assert torch.equal(payload["b"], numbers("b", (9, 2)) / 7)
        wanted = (payload["b"].double() @ payload["a"].double() * 0.5).float()
        torch.testing.assert_close(delta.decode("factors"), wanted, rtol=2**-23, atol=0)
