"""The codec policy: which codec for which part, mixed precision under a budget, and quantised LoRA factors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_quant.calibration import output_error
from pydantic import ValidationError

from gym_fed.config.delta import CodecPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import EncodeReport, encode_delta, lora_delta
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.delta.file import DeltaFile
from gym_fed.delta.policy import choose, part_of

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (172, 64),
    "model.layers.1.mlp.up_proj.weight": (172, 64),
    "model.layers.2.mlp.up_proj.weight": (172, 64),
    "model.norm.weight": (64,),
    "lm_head.weight": (96, 64),
}
UP = [name for name in SHAPES if "up_proj" in name]
BASE = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
SPEC = BaseSpec.of(BASE, "small")


def tuned(seed: int = 0, **scales: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        scale = next((value for part, value in scales.items() if part in name.replace(".", "_")), 0.01)
        found[name] = scale * torch.randn(shape, generator=generator)
    return found


def policy(**values: Any) -> CodecPolicy:
    return CodecPolicy.model_validate({"error_feedback": False, **values})


def codecs_of(report: EncodeReport) -> dict[str, str | None]:
    return {tensor.name: tensor.codec for tensor in report.tensors}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("transformer.wte.weight", "embeddings"),
        ("transformer.wpe.weight", "embeddings"),
        ("gpt_neox.embed_in.weight", "embeddings"),
        ("tok_embeddings.weight", "embeddings"),
        ("bert.embeddings.word_embeddings.weight", "embeddings"),
        ("lm_head.weight", "head"),
        ("embed_out.weight", "head"),
        ("model.layers.0.mlp.up_proj.weight", "body"),
    ],
)
def test_embeddings_and_head_are_found_by_their_names(name: str, part: str) -> None:
    assert part_of(name, (8, 8)) == part
    assert part_of(name, (8,)) == "body"


def test_embeddings_head_and_norms_need_not_be_kept_whole(tmp_path: Path) -> None:
    wanted = policy(embeddings="int4", head="bitdelta-row", small_tensors="int8", scale_dtype="bfloat16")
    report = encode_delta(tuned(), BASE, wanted, tmp_path / "d", SPEC)
    assert codecs_of(report)["model.embed_tokens.weight"] == "int4"
    assert codecs_of(report)["model.norm.weight"] == "int8"
    assert next(t.why for t in report.tensors if t.name == "lm_head.weight") == "head: bitdelta-row"
    with DeltaFile.open(tmp_path / "d", SPEC) as delta:
        assert delta.record("lm_head.weight").params == {"group_size": 64, "scale_dtype": "bfloat16"}
        assert delta.record("model.embed_tokens.weight").params["group_size"] == 64
        assert delta.record(UP[0]).codec == "bitdelta"


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "ternary", "binary"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_grid_can_be_the_codec_of_a_file(codec: str, symmetric: bool, tmp_path: Path) -> None:
    report = encode_delta(
        tuned(), BASE, policy(codec=codec, symmetric=symmetric, group_size=32), tmp_path / "d", SPEC
    )
    with DeltaFile.open(tmp_path / "d", SPEC) as delta:
        assert {delta.record(name).codec for name in UP} == {codec}
        assert delta.norm() == pytest.approx(report.norm)
        lost = sum(float((delta.decode(name) - tuned()[name]).square().sum()) for name in UP)
    assert lost < 0.4 * sum(float(tuned()[name].square().sum()) for name in UP)


def test_grids_have_a_scale_per_row_by_default() -> None:
    delta = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    groups = {"tensor": None, "row": 64, "auto": 64, None: 64, 16: 16}
    for asked, found in groups.items():
        choice = choose("w", delta, policy(codec="int4", group_size=asked))
        assert choice.record.params.get("group_size") == found


def test_embeddings_have_a_scale_a_row_by_default_unless_group_size_or_a_budget_decides() -> None:
    delta = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))

    def group(name: str, **values: Any) -> tuple[str, int | None]:
        record = choose(name, delta, policy(small_max_elements=0, **values)).record
        return record.codec, record.params.get("group_size")

    table, head, body = "model.embed_tokens.weight", "lm_head.weight", "model.up_proj.weight"
    assert group(table) == group(head) == ("bitdelta", 64)
    assert group(body) == group(table, embeddings="same") == ("bitdelta", None)
    assert (
        group(table, group_size="tensor")
        == group(table, max_bits_per_weight=1.0, error_feedback=True)
        == ("bitdelta", None)
    )
    assert group(table, codec="dense") == ("dense", None)
    assert group(table, embeddings="bitdelta-row", group_size="tensor") == ("bitdelta", 64)


def test_without_a_budget_auto_is_sign_bits_and_says_so() -> None:
    choice = choose("w", torch.ones(64, 64), policy(codec="auto"))
    assert (choice.record.codec, choice.why) == (
        "bitdelta",
        "auto: sign bits, 16 times smaller than bfloat16",
    )


@pytest.mark.parametrize("bits", [0.6, 1.5, 2.0, 3.0, 5.0, 9.0])
def test_under_a_budget_auto_spends_it_where_the_error_is_and_never_more(bits: float, tmp_path: Path) -> None:
    wanted = CodecPolicy(codec="auto", max_bits_per_weight=bits, scale_dtype="bfloat16")
    changed = tuned(layers_0=0.1, layers_1=0.02, layers_2=0.001)
    residual = ErrorFeedback.load(tmp_path / "r", SPEC.digest)
    report = encode_delta(changed, BASE, wanted, tmp_path / "d", SPEC, residual)
    assert 0.6 * bits < report.bits_per_weight <= bits
    sizes = {t.name: t.payload_bytes for t in report.tensors}
    assert sizes[UP[0]] >= sizes[UP[1]] >= sizes[UP[2]]
    assert bits > 8 or sizes[UP[0]] > sizes[UP[2]]
    residual.save()
    with DeltaFile.open(tmp_path / "d", SPEC) as delta:
        for name in SHAPES:
            sent = delta.decode(name) if name in delta else torch.zeros(SHAPES[name])
            held = residual.residual(name)
            total = sent if held is None else sent + held
            torch.testing.assert_close(total, changed[name], rtol=0, atol=1e-6)


def test_mixed_precision_loses_less_than_any_one_codec_of_the_same_size(tmp_path: Path) -> None:
    changed = tuned(layers_0=0.1, layers_1=0.02, layers_2=0.001)

    def lost(path: Path) -> float:
        with DeltaFile.open(path, SPEC) as delta:
            return sum(
                float(((delta.decode(n) if n in delta else 0.0) - changed[n]).square().sum()) for n in SHAPES
            )

    for codec in ("ternary", "int2", "int4"):
        one = policy(codec=codec, small_tensors="int8", scale_dtype="bfloat16")
        size = encode_delta(changed, BASE, one, tmp_path / "one", SPEC).bits_per_weight
        auto = CodecPolicy(
            codec="auto", max_bits_per_weight=size, small_tensors="int8", scale_dtype="bfloat16"
        )
        residual = ErrorFeedback.load(tmp_path / "r", SPEC.digest)
        encode_delta(changed, BASE, auto, tmp_path / "auto", SPEC, residual)
        assert lost(tmp_path / "auto") < 0.8 * lost(tmp_path / "one")


def test_a_loud_layer_gets_more_bits_than_a_quiet_one_of_the_same_delta(tmp_path: Path) -> None:
    wanted = CodecPolicy(codec="auto", max_bits_per_weight=2.0, scale_dtype="bfloat16")
    importance = {UP[0]: torch.full((64,), 100.0), UP[1]: torch.ones(64), UP[2]: torch.ones(64)}
    residual = ErrorFeedback.load(tmp_path / "r", SPEC.digest)
    report = encode_delta(tuned(), BASE, wanted, tmp_path / "d", SPEC, residual, importance=importance)
    sizes = {t.name: t.payload_bytes for t in report.tensors}
    assert sizes[UP[0]] > sizes[UP[1]]


def test_importance_reaches_the_grids(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    importance = {name: torch.rand(64, generator=generator) ** 4 for name in UP}
    errors = []
    for given in (None, importance):
        encode_delta(tuned(), BASE, policy(codec="int2"), tmp_path / "d", SPEC, importance=given)
        with DeltaFile.open(tmp_path / "d", SPEC) as delta:
            errors.append(sum(output_error(tuned()[n], delta.decode(n), importance[n]) for n in UP))
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codec": "dense", "symmetric": False}, "symmetric applies only to codecs with offsets"),
        ({"factor_bits": 2.0}, "factor_bits applies to factors 'auto'"),
        ({"factor_group_size": 64}, "applies to quantised factors"),
        ({"embeddings": "zip"}, "unknown codec 'zip'"),
        ({"factors": "int3"}, "unknown codec 'int3'"),
        ({"factors": "dense"}, "is not for factors"),
    ],
)
def test_new_keys_that_contradict_each_other_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CodecPolicy.model_validate(values)


def lora(seed: int, rank: int = 8, decay: float = 0.6) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Factors whose components fall off, as those of trained adapters do."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in UP:
        rows, cols = SHAPES[name]
        b = torch.randn(rows, rank, generator=generator) * decay ** torch.arange(rank)
        found[name] = (torch.randn(rank, cols, generator=generator) * 0.01, b, 2.0)
    return found


def products(factors: dict[str, tuple[torch.Tensor, torch.Tensor, float]]) -> dict[str, torch.Tensor]:
    return {name: scaling * (b @ a) for name, (a, b, scaling) in factors.items()}


def distance(path: Path, wanted: dict[str, torch.Tensor]) -> float:
    with DeltaFile.open(path, SPEC) as delta:
        lost = sum(float((delta.decode(n) - d).square().sum()) for n, d in wanted.items() if n in delta)
        lost += sum(float(d.square().sum()) for n, d in wanted.items() if n not in delta)
    return math.sqrt(lost / sum(float(d.square().sum()) for d in wanted.values()))


def test_factors_stay_as_trained_without_a_policy_and_say_how_they_compare_with_sign_bits(
    tmp_path: Path,
) -> None:
    first = lora_delta(lora(0), tmp_path / "a", SPEC)
    second = lora_delta(lora(0), tmp_path / "b", SPEC, policy=CodecPolicy())
    assert first.sha256 == second.sha256
    assert "times larger than the product's sign bits" in first.tensors[0].why


def test_factors_in_float32_lose_nothing_need_no_residual_and_are_twice_as_large(tmp_path: Path) -> None:
    wanted = CodecPolicy(factors="float32")
    assert wanted.error_feedback
    assert not wanted.quantises_factors
    exact = lora_delta(lora(0), tmp_path / "exact", SPEC, policy=wanted)
    rounded = lora_delta(lora(0), tmp_path / "rounded", SPEC)
    assert distance(tmp_path / "exact", products(lora(0))) < 1e-6
    assert [t.payload_bytes for t in exact.tensors] == [2 * t.payload_bytes for t in rounded.tensors]
    with DeltaFile.open(tmp_path / "exact", SPEC) as delta:
        assert delta.record(UP[0]).params == {"rank": 8, "scaling": 2.0, "factors": "float32"}


def test_a_full_delta_of_low_rank_is_written_as_float32_factors(tmp_path: Path) -> None:
    wanted = policy(codec="lora", lora_rank=8, factors="float32")
    report = encode_delta({**tuned(), **products(lora(0))}, BASE, wanted, tmp_path / "d", SPEC)
    assert codecs_of(report)[UP[0]] == "lora"
    # The tuned weights were base plus product rounded to float32: what is left of that is the error.
    assert distance(tmp_path / "d", products(lora(0))) < 1e-5


@pytest.mark.few(9, "ranks and codecs are independent")
@pytest.mark.parametrize("rank", [1, 3, 8, 13])
@pytest.mark.parametrize("factors", ["int8", "int4", "int2", "ternary", "binary", "auto"])
def test_factors_of_any_rank_are_quantised(factors: str, rank: int, tmp_path: Path) -> None:
    found = lora(0, rank)
    most = {"int8": 0.02, "int4": 0.2, "int2": 0.6, "ternary": 0.7, "binary": 0.9, "auto": 0.8}
    report = lora_delta(found, tmp_path / "q", SPEC, policy=policy(factors=factors))
    assert distance(tmp_path / "q", products(found)) < most[factors]
    if factors == "auto":
        elements = sum(a.numel() + b.numel() for a, b, _ in found.values())
        assert sum(t.payload_bytes for t in report.tensors) * 8 <= 1.75 * elements


def test_bits_by_component_lose_less_than_one_grid_of_the_same_size(tmp_path: Path) -> None:
    found = lora(0)
    elements = sum(a.numel() + b.numel() for a, b, _ in found.values())
    for factors in ("ternary", "int2", "int4"):
        one = lora_delta(found, tmp_path / "one", SPEC, policy=policy(factors=factors))
        bits = 8 * sum(t.payload_bytes for t in one.tensors) / elements
        lora_delta(found, tmp_path / "auto", SPEC, policy=policy(factors="auto", factor_bits=bits))
        assert distance(tmp_path / "auto", products(found)) < 0.8 * distance(
            tmp_path / "one", products(found)
        )


def test_what_factors_lost_in_one_round_is_in_the_next(tmp_path: Path) -> None:
    wanted = CodecPolicy(factors="auto", factor_bits=1.0)
    residual = ErrorFeedback.load(tmp_path / "r", SPEC.digest)
    sent = {name: torch.zeros(SHAPES[name]) for name in UP}
    meant = {name: torch.zeros(SHAPES[name]) for name in UP}
    alone = {name: torch.zeros(SHAPES[name]) for name in UP}
    for seed in range(3):
        found = lora(seed)
        lora_delta(found, tmp_path / "d", SPEC, policy=wanted, residual=residual)
        residual.save()
        lora_delta(found, tmp_path / "e", SPEC, policy=policy(factors="auto", factor_bits=1.0))
        for path, total in ((tmp_path / "d", sent), (tmp_path / "e", alone)):
            with DeltaFile.open(path, SPEC) as delta:
                for name in delta.names:
                    total[name] += delta.decode(name)
        for name, product in products(found).items():
            meant[name] += product
    for name in UP:
        held = residual.residual(name)
        assert held is not None
        torch.testing.assert_close(sent[name] + held, meant[name], rtol=0, atol=1e-5)
    with_feedback, without = (
        sum(float((total[n] - meant[n]).square().sum()) for n in UP) for total in (sent, alone)
    )
    assert with_feedback < without


def test_a_residual_of_a_layer_that_is_not_trained_now_goes_on_waiting(tmp_path: Path) -> None:
    wanted = CodecPolicy(factors="ternary")
    residual = ErrorFeedback.load(tmp_path / "r", SPEC.digest)
    lora_delta(lora(0), tmp_path / "d", SPEC, policy=wanted, residual=residual)
    residual.save()
    before = residual.residual(UP[1])
    lora_delta({UP[0]: lora(1)[UP[0]]}, tmp_path / "e", SPEC, policy=wanted, residual=residual)
    residual.save()
    after = residual.residual(UP[1])
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_factors_that_did_not_change_anything_make_an_empty_delta(tmp_path: Path) -> None:
    zero = {name: (a, torch.zeros_like(b), s) for name, (a, b, s) in lora(0).items()}
    report = lora_delta(zero, tmp_path / "d", SPEC, policy=policy(factors="auto"))
    assert report.norm == 0.0


@pytest.mark.parametrize(
    ("given", "with_residual", "message"),
    [
        (CodecPolicy(factors="int4"), False, "no residual was given, but factors are int4"),
        (policy(factors="int4"), True, "a residual was given, but factors are int4, error_feedback: False"),
        (CodecPolicy(), True, "a residual was given, but factors are bfloat16"),
        (None, True, "without a policy"),
        (CodecPolicy(max_bits_per_weight=0.5), False, "max_bits_per_weight allows"),
        (policy(factors="auto", factor_bits=0.001), False, "too few for any component of 'small'"),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused(
    given: CodecPolicy | None, with_residual: bool, message: str, tmp_path: Path
) -> None:
    residual = ErrorFeedback.load(tmp_path / "r", SPEC.digest) if with_residual else None
    with pytest.raises(GymError, match=message) as caught:
        lora_delta(lora(0), tmp_path / "d", SPEC, policy=given, residual=residual)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "d").exists()


def test_factors_that_are_not_finite_are_refused_by_the_name_of_their_tensor(tmp_path: Path) -> None:
    found = lora(0)
    found[UP[1]][0][2, 3] = float("nan")
    with pytest.raises(GymError, match=rf"tensor '{UP[1]}': factor A is not finite"):
        lora_delta(found, tmp_path / "d", SPEC, policy=policy(factors="int4"))


def test_a_full_delta_as_quantised_factors_keeps_what_they_span(tmp_path: Path) -> None:
    wanted = policy(codec="lora", lora_rank=8, factors="auto", factor_bits=4.0)
    changed = {**tuned(), **products(lora(0))}
    report = encode_delta(changed, BASE, wanted, tmp_path / "d", SPEC)
    assert codecs_of(report)[UP[0]] == "lora"
    assert distance(tmp_path / "d", products(lora(0))) < 0.15
    assert "the product's sign bits" in next(t.why for t in report.tensors if t.name == UP[0])
