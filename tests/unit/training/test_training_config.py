"""Recipes: every file in configs/ is valid, and contradictions are refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml, load_config, validate
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.training.run.checks import check_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
RECIPES = [file for file in CONFIGS if "algorithm" in yaml.safe_load(file.read_text())]


def test_there_are_recipes() -> None:
    assert {"nano-pretrain", "nano-sft", "nano-lora"} <= {file.stem for file in RECIPES}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_loads_names_a_registered_algorithm_and_survives_a_round_trip(
    file: Path, tmp_path: Path
) -> None:
    config = load_config(file, TrainingConfig)
    assert config.algorithm in ALGORITHMS.own()
    assert config.data
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml", TrainingConfig) == config


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": "gym-nano", "model_init": {}}, "model_init"),
        ({"packing": True, "assistant_only_loss": True}, "mutually exclusive"),
        ({"data": [{"tasks": ["copy"]}]}, "tasks need num_examples"),
        ({"data": [{}]}, "one of path, tasks"),
        ({"lr": 1.0}, "did you mean|known"),
        ({"model_name_or_path": "m", "dataset_name": "d"}, "did you mean 'model'"),
        ({"sequence_len": 512}, "did you mean 'max_length'"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"device": "tpu"}, "'auto', 'cpu', 'cuda' or 'mps'"),
    ],
)
def test_a_contradiction_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        validate(values, TrainingConfig, "test.yaml")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_every_algorithm_file_holds_one_algorithm() -> None:
    assert list(ALGORITHMS.own()) == sorted(ALGORITHMS.own())
    for name in ALGORITHMS.own():
        assert ALGORITHMS.new(name) is not None
    with pytest.raises(GymError, match="unknown algorithm 'reinforce'") as caught:
        ALGORITHMS.new("reinforce")
    assert "sft" in caught.value.hint


def test_a_round_warms_up_under_a_constant_rate_too() -> None:
    def schedule(**recipe: Any) -> tuple[str, int]:
        config = round_training(TrainingRecipe(**recipe), 1, Path("round"))
        return config.lr_scheduler_type, config.warmup_steps

    assert schedule() == ("constant", 0)
    assert schedule(warmup_steps=3) == ("constant_with_warmup", 3)
    assert schedule(warmup_steps=3, lr_scheduler_type="cosine") == ("cosine", 3)


def test_a_recipe_that_groups_by_length_does_so_in_the_round_and_others_name_no_such_key() -> None:
    grouping = TrainingRecipe(group_by_length=True)
    assert round_training(grouping, 1, Path("round")).group_by_length
    assert TrainingRecipe.model_validate_json(grouping.model_dump_json()) == grouping
    assert "group_by_length" not in TrainingRecipe().model_dump(mode="json")


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"privacy": {"noise_multiplier": 1.0}}, "batches would depend on the rows"),
        ({"algorithm": "kto"}, "kto determines the order of its rows"),
    ],
)
def test_a_recipe_that_cannot_group_by_length_is_refused(recipe: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"group_by_length: .*{why}"):
        TrainingRecipe(group_by_length=True, **recipe)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"finetuning": "lora"}, "lora trains new factors every round"),
        ({"privacy": {"noise_multiplier": 1.0}}, "DP-SGD has its own optimiser"),
    ],
)
def test_a_recipe_whose_optimizer_has_no_state_to_keep_is_refused(recipe: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"keep_optimizer_state: {why}"):
        TrainingRecipe(keep_optimizer_state=True, **recipe)


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "orpo", "simpo", "tdpo"])
def test_a_recipe_whose_dropout_no_contributor_would_take_is_refused(algorithm: str) -> None:
    recipe = {"algorithm": algorithm, "finetuning": "lora", "lora": {"lora_dropout": 0.1}}
    with pytest.raises(ValueError, match=f"lora.lora_dropout: {algorithm} switches dropout off"):
        TrainingRecipe(**recipe)
    check_config(
        round_training(
            TrainingRecipe(**recipe, **{algorithm: {"disable_dropout": False}}), 1, Path("round"), "cpu"
        )
    )
