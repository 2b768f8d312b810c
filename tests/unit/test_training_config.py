"""Recipes: every file in configs/ is valid, and contradictions are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gym_fed.config import TrainingConfig, dump_yaml, load_config
from gym_fed.config.yaml_file import validate
from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.algorithms import algorithm_names, get_algorithm

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
RECIPES = [file for file in CONFIGS if "algorithm" in yaml.safe_load(file.read_text())]


def test_there_are_recipes() -> None:
    assert {"nano-pretrain", "nano-sft", "nano-lora"} <= {file.stem for file in RECIPES}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_loads_names_a_registered_algorithm_and_survives_a_round_trip(
    file: Path, tmp_path: Path
) -> None:
    config = load_config(file, TrainingConfig)
    assert config.algorithm in algorithm_names()
    assert config.data
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "again.yaml", TrainingConfig) == config


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": "gym-nano", "model_init": {}}, "model_init"),
        ({"packing": True, "assistant_only_loss": True}, "exclude each other"),
        ({"data": [{"tasks": ["copy"]}]}, "tasks need num_examples"),
        ({"data": [{}]}, "either path or tasks"),
        ({"lr": 1.0}, "did you mean|known"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"device": "tpu"}, "'auto', 'cpu', 'cuda' or 'mps'"),
    ],
)
def test_a_contradiction_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        validate(values, TrainingConfig, "test.yaml")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_every_algorithm_file_holds_one_algorithm() -> None:
    assert algorithm_names() == sorted(algorithm_names())
    for name in algorithm_names():
        assert get_algorithm(name) is not None
    with pytest.raises(GymError, match="'reinforce' is unknown") as caught:
        get_algorithm("reinforce")
    assert "sft" in caught.value.hint
