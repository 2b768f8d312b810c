"""Rows that are split over processes, and models that are cut into stages: one pair of processes looks at all of it."""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import Any

import pytest

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.training.processes.sharding import check_distributed
from gym_fed.training.processes.stages import balanced
from tests.support.process_pair import run_processes
from tests.support.split_rows_checks import MODELS, REFUSED


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pair")
    run_processes("tests.support.split_rows_checks:look", folder, 2)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def test_each_process_gets_all_tokens_of_its_heads_and_returns_them(found: list[dict[str, Any]]) -> None:
    assert [one["exchanged"] for one in found] == [True, True]


@pytest.mark.parametrize("name", MODELS)
def test_split_rows_give_the_log_probabilities_and_gradients_of_whole_ones(
    name: str, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert len(one["compared"][name]) == 8
        assert max(one["compared"][name].values()) < 1e-4, one["compared"][name]


def test_answers_are_generated_from_whole_rows(found: list[dict[str, Any]]) -> None:
    assert [one["generated"] for one in found] == [True, True]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("odd heads", "has 3 attention heads, which cannot be divided evenly among 2 processes"),
        ("soft cap", "softcap"),
        ("recurrent", "MambaForCausalLM"),
        ("sinks", "s_aux"),
    ],
)
def test_a_model_whose_rows_cannot_be_split_is_refused_by_name(
    name: str, reason: str, found: list[dict[str, Any]]
) -> None:
    assert name in REFUSED
    for one in found:
        assert one["refused"][name].startswith("distributed.strategy: sequence_parallel: ")
        assert reason in one["refused"][name]


def test_a_model_that_cannot_be_cut_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["uncut"].startswith(
            "distributed.strategy: pipeline_parallel: GPT2LMHeadModel has weights besides"
        )
        assert "fsdp2" in one["uncut"]


def test_a_stage_without_trained_weights_is_refused(found: list[dict[str, Any]]) -> None:
    assert "has no trained weights in blocks 0 to " in found[0]["untrained"]


def test_each_process_keeps_a_part_of_the_model_and_the_main_one_collects_it(
    found: list[dict[str, Any]],
) -> None:
    main, other = (one["cut"] for one in found)
    assert 0 < main["kept"] < 0.8
    assert 0 < other["kept"] < 0.8
    assert main["collected"]
    assert (main["number"] > 20, other["number"]) == (True, 0)
    assert "outside the pipeline" in main["outside"]


def test_stages_are_balanced() -> None:
    draw = random.Random(0)
    for _ in range(30):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(1, 8))]
        stages = draw.randint(1, len(costs))
        ranges = balanced(costs, stages)
        assert [n for part in ranges for n in part] == list(range(len(costs)))
        assert len(ranges) == stages
        assert all(ranges)
        best = min(
            max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))
            for cuts in combinations(range(1, len(costs)), stages - 1)
        )
        assert max(sum(costs[n] for n in part) for part in ranges) == best


def refused(settings: dict[str, Any], processes: int = 2, **more: Any) -> str:
    config = TrainingConfig(model="gym-nano", distributed=settings, **more)
    with pytest.raises(GymError) as caught:
        check_distributed(config, processes)
    return f"{caught.value.message} ({caught.value.hint})"


@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        ({"sequence_parallel_size": 3}, {}, "sequence_parallel_size: 2 processes are not a multiple of 3"),
        ({}, {"algorithm": "kto"}, "splits the tokens of a row, which kto does not support here"),
        ({}, {"attention": "eager"}, "attention is eager"),
        ({}, {"neftune_noise_alpha": 5.0}, "cannot be combined with neftune_noise_alpha"),
    ],
)
def test_what_reads_whole_rows_is_refused_before_loading(
    settings: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    assert reason in refused({"strategy": "sequence_parallel", **settings}, **more)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"gradient_accumulation_steps": 1}, "needs as many micro-batches as processes (2)"),
        ({"algorithm": "kto"}, "which kto does not support here"),
        ({"finetuning": "ia3"}, "is not tested with finetuning: ia3"),
        ({"optimizer": "muon"}, "which muon does not support here"),
        (
            {"algorithm": "dpo", "dpo": {"precompute_ref_log_probs": False}},
            "precompute_ref_log_probs is false",
        ),
    ],
)
def test_what_a_pipeline_does_not_support_is_refused_before_loading(
    more: dict[str, Any], reason: str
) -> None:
    steps = {"gradient_accumulation_steps": 2, **more}
    assert reason in refused({"strategy": "pipeline_parallel"}, **steps)


@pytest.mark.parametrize("key", [{"sequence_parallel_size": 2}, {"pipeline_schedule": "gpipe"}])
def test_a_setting_of_another_strategy_is_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(key))} applies to"):
        TrainingConfig(model="gym-nano", distributed=key)
