"""LoRA rounds send the soup back as it was merged: stacked factors, and the values where there are none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_server.rounds.downloads import SoupForm, soup_bytes
from gym_server.rounds.factor_checks import not_low_rank
from pydantic import ValidationError

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.config.hub.task import LoraRecipe, TaskSpec, TrainingRecipe
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.encode import lora_delta
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.soup.adapters import largest_rank
from gym_fed.soup.merging import merge

AS_MERGED = CodecPolicy(codec="as-merged")
SPEC = BaseSpec("small", "sha256:" + "ab" * 32, {"q.weight": (40, 60), "k.weight": (8, 60)})
LAYERS, HIDDEN, KEYS, INNER, WORDS = 30, 576, 192, 1536, 49152


def smollm2() -> BaseSpec:
    """The shapes of SmolLM2-135M."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            shapes[f"{at}.{name}.weight"] = shape
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    return BaseSpec("SmolLM2-135M", "sha256:" + "cd" * 32, {**shapes, "model.norm.weight": (HIDDEN,)})


@contextlib.contextmanager
def adapters(folder: Path, count: int, spec: BaseSpec, rank: int) -> Iterator[list[DeltaFile]]:
    """LoRA updates in bfloat16, as contributors send them."""
    generator = torch.Generator().manual_seed(count)
    names = [n for n, s in spec.shapes.items() if len(s) == 2 and "embed" not in n]
    with contextlib.ExitStack() as stack:
        opened = []
        for index in range(count):
            factors = {
                n: (
                    torch.randn(rank, spec.shapes[n][1], generator=generator),
                    torch.randn(spec.shapes[n][0], rank, generator=generator),
                    2.0,
                )
                for n in names
            }
            lora_delta(factors, folder / f"{index}.gymdelta", spec)
            opened.append(stack.enter_context(DeltaFile.open(folder / f"{index}.gymdelta", spec)))
        yield opened


def test_factors_travel_stacked_and_apply_as_their_combination(tmp_path: Path) -> None:
    with adapters(tmp_path, 3, SPEC, 2) as updates:
        report = merge(updates, [1.0] * 3, SoupRecipe(codec=AS_MERGED), tmp_path / "soup", SPEC)
        true = {n: sum(u.decode(n).double() for u in updates) / 3 for n in SPEC.shapes}
    with DeltaFile.open(tmp_path / "soup", SPEC) as soup:
        assert {n: soup.record(n).codec for n in soup.names} == {"q.weight": "lora", "k.weight": "lora"}
        assert soup.record("q.weight").params["rank"] == 6
        tensors = {name: torch.zeros(shape) for name, shape in SPEC.shapes.items()}
        apply_delta(tensors, soup)
    for name, wanted in true.items():
        assert float((tensors[name].double() - wanted).norm() / wanted.norm()) < 4e-3  # bfloat16
    assert set(report.lost.values()) == {0.0}


def test_a_tensor_of_which_factors_would_be_no_smaller_travels_as_values(tmp_path: Path) -> None:
    assert largest_rank((8, 60)) == 7
    assert largest_rank((40, 60)) == 23
    with adapters(tmp_path, 4, SPEC, 2) as updates:
        merge(updates, [1.0] * 4, SoupRecipe(codec=AS_MERGED), tmp_path / "soup", SPEC)
        true = {n: sum(u.decode(n).double() for u in updates) / 4 for n in SPEC.shapes}
    with DeltaFile.open(tmp_path / "soup", SPEC) as soup:
        assert {n: soup.record(n).codec for n in soup.names} == {"q.weight": "lora", "k.weight": "dense"}
        for name, wanted in true.items():
            assert float((soup.decode(name).double() - wanted).norm() / wanted.norm()) < 4e-3


@pytest.mark.parametrize("changes", [{"aggregator": "median"}, {"server_optimizer": "momentum"}])
def test_a_soup_that_is_no_factors_travels_as_values(tmp_path: Path, changes: dict[str, Any]) -> None:
    from gym_fed.soup.building import build_optimizer
    from gym_fed.soup.optimizer import OptimizerState

    recipe = SoupRecipe(codec=AS_MERGED, **changes)
    rule = build_optimizer(recipe)
    state = OptimizerState.load(tmp_path / "none", SPEC.digest, rule.rule) if rule else None
    with adapters(tmp_path, 3, SPEC, 2) as updates:
        merge(updates, [1.0] * 3, recipe, tmp_path / "soup", SPEC, optimizer_state=state)
    with DeltaFile.open(tmp_path / "soup", SPEC) as soup:
        assert {soup.record(n).codec for n in soup.names} == {"dense"}


@pytest.mark.parametrize("contributors", [2, 8])
def test_on_smollm2_the_soup_of_lora_updates_has_the_announced_size(
    tmp_path: Path, contributors: int
) -> None:
    spec = smollm2()
    layer = {n: s for n, s in spec.shapes.items() if ".layers.0." in n and len(s) == 2}
    one = BaseSpec(spec.model_name, spec.digest, layer)
    config = ServerConfig(recipe=TrainingRecipe(finetuning="lora"))
    with adapters(tmp_path, contributors, one, 8) as updates:
        soup = SoupRecipe(codec=config.soup.codec)
        size = merge(updates, [1.0] * contributors, soup, tmp_path / "soup", one).size_bytes
    assert size <= soup_bytes(config, one, contributors) <= size + 64
    size = soup_bytes(config, spec, contributors)
    dense = ServerConfig.model_validate(
        {"recipe": {"finetuning": "lora"}, "soup": {"codec": {"codec": "dense"}}}
    )
    assert size < 1.01 * contributors * soup_bytes(config, spec, 1)
    assert soup_bytes(dense, spec, contributors) > (5 if contributors == 8 else 20) * size


def test_lora_rounds_send_factors_back_by_default_and_full_ones_integers() -> None:
    lora = ServerConfig.model_validate({"recipe": {"finetuning": "lora"}})
    assert lora.soup.codec == AS_MERGED
    assert not AS_MERGED.error_feedback
    assert ServerConfig().soup.codec == CodecPolicy(codec="lattice")
    said = {"recipe": {"finetuning": "lora"}, "soup": {"codec": {"codec": "dense"}}}
    assert ServerConfig.model_validate(said).soup.codec.codec == "dense"


@pytest.mark.parametrize(
    ("changes", "form", "why"),
    [
        ({}, "factors", "rank 8 for each"),
        ({"soup": {"aggregator": "byzantine_robust"}}, "factors", "stacked"),
        ({"soup": {"aggregator": "median"}}, "values", "coordinate-wise"),
        ({"soup": {"aggregator": "bulyan"}}, "values", "coordinate-wise"),
        ({"soup": {"server_optimizer": "adam"}}, "values", "server_optimizer adam"),
        ({"soup": {"codec": {"codec": "dense"}}}, "values", "leave soup.codec out"),
    ],
)
def test_a_hub_says_in_which_form_its_soups_travel(changes: dict[str, Any], form: str, why: str) -> None:
    config = ServerConfig.model_validate({"recipe": {"finetuning": "lora"}, **changes})
    found = SoupForm.of(config)
    assert found.form == form
    assert why in found.why


def test_coordinate_rules_with_a_frozen_a_send_factors_of_one_updates_rank() -> None:
    recipe = {"finetuning": "lora", "lora": {"freeze_a": True}}
    config = ServerConfig.model_validate({"recipe": recipe, "soup": {"aggregator": "median"}})
    assert SoupForm.of(config).form == "factors"
    assert soup_bytes(config, smollm2(), 8) == soup_bytes(config, smollm2(), 2)


def test_as_merged_is_for_soups_and_takes_no_error_feedback() -> None:
    with pytest.raises(ValidationError, match="only for soups"):
        ServerConfig.model_validate({"codec": {"codec": "as-merged"}})
    with pytest.raises(ValidationError, match="error_feedback: false"):
        CodecPolicy(codec="as-merged", error_feedback=True)


def test_an_update_that_would_make_everybodys_download_larger_is_no_lora_update(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    spec = TaskSpec(
        server="s0123456789abcdef",
        server_round=1,
        base_model="small",
        base_digest=digest,
        version_digest=digest,
        recipe=TrainingRecipe(finetuning="lora", lora=LoraRecipe(r=2)),
        max_update_bytes=1,
        deadline_seconds=1,
    )
    with adapters(tmp_path, 1, SPEC, 2) as (update,):
        assert not_low_rank(update, spec) is None
    with adapters(tmp_path, 1, SPEC, 3) as (update,):
        assert "rank 3" in str(not_low_rank(update, spec))
    entries = [DeltaEntry.of("q.weight", torch.ones(40, 60), "dense", dtype="float32")]
    write_delta(tmp_path / "dense", entries, SPEC)
    with DeltaFile.open(tmp_path / "dense", SPEC) as update:
        assert "codec dense" in str(not_low_rank(update, spec))
