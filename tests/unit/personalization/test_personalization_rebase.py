"""A delta is carried to another base as it is: the same signs and factors, scaled exactly where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.personalization.rebase import carry_delta

SHAPE = (24, 40)
CODECS: dict[str, dict[str, Any]] = {
    "bitdelta": {"group_size": 40},
    "int8": {},
    "int4": {"symmetric": False, "group_size": 8},
    "int2": {"symmetric": False},
    "ternary": {"symmetric": False},
    "binary": {},
    "dense": {},
    "lora": {"rank": 3},
}
QUANTISED = {"rank": 3, "factors": "int4"}


def base(digest: str, shape: tuple[int, ...] = SHAPE) -> BaseSpec:
    return BaseSpec(f"base-{digest}", "sha256:" + digest * 64, {"w": shape, "other": (4, 4)})


def a_delta(folder: Path, codec: str, params: dict[str, Any]) -> DeltaFile:
    torch.manual_seed(0)
    write_delta(folder / "old", [DeltaEntry.of("w", torch.randn(SHAPE) * 1e-2, codec, **params)], base("0"))
    return DeltaFile.open(folder / "old", base("0"))


@pytest.mark.parametrize(("codec", "params"), [*CODECS.items(), ("lora", QUANTISED)])
def test_every_codec_is_carried_whole_and_scaled(codec: str, params: dict[str, Any], tmp_path: Path) -> None:
    with a_delta(tmp_path, codec, params) as old:
        carry_delta(old, base("1"), tmp_path / "same")
        carry_delta(old, base("1"), tmp_path / "half", 0.5)
        with (
            DeltaFile.open(tmp_path / "same", base("1")) as same,
            DeltaFile.open(tmp_path / "half", base("1")) as half,
        ):
            assert same.record("w") == old.record("w")
            for field, tensor in old.payload("w").items():
                assert torch.equal(same.payload("w")[field], tensor), field
            torch.testing.assert_close(half.decode("w"), 0.5 * old.decode("w"), rtol=1e-5, atol=1e-9)
            assert half.size_bytes <= old.size_bytes + 64


def test_a_base_without_the_tensor_or_with_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    with a_delta(tmp_path, "bitdelta", {}) as old:
        for onto, words in (
            (base("1", (24, 41)), r"tensor 'w' \[24, 40\]: the base 'base-1' has it in shape \[24, 41\]"),
            (BaseSpec("b", "sha256:" + "1" * 64, {"other": (4, 4)}), "has no such tensor"),
        ):
            with pytest.raises(GymError, match=words) as caught:
                carry_delta(old, onto, tmp_path / "new")
            assert caught.value.code is ErrorCode.BASE_MISMATCH
    assert not (tmp_path / "new").exists()
