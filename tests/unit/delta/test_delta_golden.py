"""Golden files: the bytes of format version 1. They never change without a new format version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from gym_quant.codecs.lora import Lora
from safetensors import safe_open

from gym_fed.delta.added_tokens import AddedRows, AddedToken, AddedTokens
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.writer import DeltaEntry, write_delta

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.0.mlp.down_proj.weight": (3, 172),
    "model.layers.1.mlp.down_proj.weight": (3, 172),
    "model.layers.2.mlp.down_proj.weight": (3, 172),
    "model.layers.10.mlp.down_proj.weight": (3, 172),
    "model.layers.0.q_proj.weight": (8, 12),
    "model.embed.weight": (2, 3, 5),
    "model.norm.weight": (5,),
    "model.norm.bias": (5,),
}
SPEC = BaseSpec("golden-base", "sha256:" + hashlib.sha256(b"golden").hexdigest(), SHAPES)


def golden_delta(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that every machine computes alike: small fractions with a power of two below them."""
    count = torch.Size(shape).numel()
    first = sum(name.encode())
    return ((torch.arange(first, first + count) * 37 % 101 - 50) / 256).reshape(shape)


def entries(kind: str) -> list[DeltaEntry]:
    delta = {name: golden_delta(name, shape) for name, shape in SHAPES.items()}
    down = [name for name in SHAPES if "down_proj" in name]
    if kind == "bits":
        return [DeltaEntry.of(name, tensor) for name, tensor in delta.items()]
    if kind == "groups":
        grouped = [DeltaEntry.of(name, delta[name], group_size=128) for name in down]
        return [
            *grouped,
            DeltaEntry.of("model.norm.weight", delta["model.norm.weight"], scale_dtype="bfloat16"),
        ]
    if kind == "sparse":
        return [DeltaEntry.of(name, tensor, "sparse_sign") for name, tensor in delta.items()]
    factors = Lora().encode_factors(golden_delta("a", (2, 12)), golden_delta("b", (8, 2)), 0.5)
    name = "model.layers.0.q_proj.weight"
    return [
        DeltaEntry(name, (8, 12), "lora", factors.params, lambda: factors.payload),
        DeltaEntry.of("model.norm.weight", delta["model.norm.weight"], "dense"),
        DeltaEntry.of("model.norm.bias", delta["model.norm.bias"], "dense", dtype="float32"),
        *(DeltaEntry.of(name, delta[name]) for name in down[1:]),
    ]


KINDS = ("bits", "groups", "mixed", "sparse")


VOCABULARY = AddedTokens(
    (AddedToken(8, "<think>", ("normalized",)), AddedToken(9, "<|end|>", ("special",))),
    {"eos_token": "<|end|>"},
)
ROWS = golden_delta("rows", (4, 12))


def write_golden(folder: Path) -> None:
    rows = DeltaEntry.of("model.layers.0.q_proj.weight[8:]", ROWS, "dense", dtype="bfloat16")
    write_delta(folder / "tokens.gymdelta", [*entries("groups"), rows], SPEC, None, VOCABULARY)
    for kind in KINDS:
        write_delta(folder / f"{kind}.gymdelta", entries(kind), SPEC, {"note": "golden"})


@pytest.mark.parametrize("kind", [*KINDS, "tokens"])
def test_the_writer_still_makes_the_golden_bytes(kind: str, tmp_path: Path) -> None:
    write_golden(tmp_path)
    assert (tmp_path / f"{kind}.gymdelta").read_bytes() == (GOLDEN / f"{kind}.gymdelta").read_bytes()


def test_the_golden_sign_bits_decode_to_signs_times_the_mean_magnitude() -> None:
    with DeltaFile.open(GOLDEN / "bits.gymdelta", SPEC) as delta:
        for name, shape in SHAPES.items():
            true = golden_delta(name, shape)
            wanted = torch.where(true >= 0, 1.0, -1.0) * true.double().abs().mean().float()
            assert torch.equal(delta.decode(name), wanted)


def test_the_golden_tokens_and_their_rows_are_what_went_in() -> None:
    with DeltaFile.open(GOLDEN / "tokens.gymdelta", SPEC, added_tokens=True) as delta:
        assert delta.vocabulary == VOCABULARY
        assert delta.added_rows == AddedRows(8, 12, ("model.layers.0.q_proj.weight",))
        assert torch.equal(delta.decode_added("model.layers.0.q_proj.weight"), ROWS)
        assert "model.layers.0.q_proj.weight" not in delta


def test_the_golden_mixed_file_decodes_to_what_went_in() -> None:
    with DeltaFile.open(GOLDEN / "mixed.gymdelta", SPEC) as delta:
        product = golden_delta("b", (8, 2)).double() @ golden_delta("a", (2, 12)).double() * 0.5
        assert torch.equal(delta.decode("model.layers.0.q_proj.weight"), product.float())
        assert torch.equal(delta.decode("model.norm.weight"), golden_delta("model.norm.weight", (5,)))
        assert torch.equal(delta.decode("model.norm.bias"), golden_delta("model.norm.bias", (5,)))
        assert "model.embed.weight" not in delta


def test_layers_of_one_shape_share_a_row_of_the_manifest() -> None:
    with safe_open(GOLDEN / "bits.gymdelta", framework="pt") as file:
        manifest = file.metadata()["gymdelta"]
        assert set(file.keys()) == {"f32", "u8"}
    assert '["model.layers.*.mlp.down_proj.weight","0-2,10",[3,172],0]' in manifest
    assert '["model.layers.0.q_proj.weight",[8,12],0]' in manifest
