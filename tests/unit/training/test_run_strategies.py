"""When a run saves checkpoints and evaluates: steps, ends of epochs, or never."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.evaluation import heldout_loss
from gym_fed.training.run.checks import check_config
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 10)
HELD_OUT = generate("copy", 4, seed=3)


class Killed(Exception):
    """Ends a run as a kill does: nothing is saved on the way out."""


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "logging_steps": 1,
        "save_final": False,
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
    }
    return TrainingConfig(**{**values, **changes})


def train(base: Path, settings: TrainingConfig, held_out: Any = HELD_OUT, **hooks: Any) -> Any:
    loaded = load_model(str(base))
    return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(ROWS, held_out)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def evaluated(folder: Path) -> list[int]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["step"] for entry in entries if "eval_loss" in entry]


def test_checkpoints_at_epoch_ends_are_kept_up_to_the_limit_and_a_killed_run_ends_with_the_same_bits(
    tiny_base: Path, tmp_path: Path
) -> None:
    whole = train(tiny_base, config(tmp_path / "whole", save_total_limit=2))
    assert whole.steps == 9  # 3 epochs of 3 steps
    assert saved(tmp_path / "whole") == ["checkpoint-6", "checkpoint-9"]
    assert evaluated(tmp_path / "whole") == [3, 6, 9]

    def kill(step: int, total: int, loss: float) -> None:
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        train(tiny_base, config(tmp_path / "killed", save_total_limit=2), on_step=kill)
    assert saved(tmp_path / "killed") == ["checkpoint-3"]
    steps: list[int] = []
    resumed = train(
        tiny_base, config(tmp_path / "killed"), on_step=lambda step, total, loss: steps.append(step)
    )
    assert steps == [4, 5, 6, 7, 8, 9]
    assert resumed.losses == whole.losses
    assert evaluated(tmp_path / "killed") == [3, 6, 9]
    for (name, left), right in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(left, right), name


def test_held_out_rows_are_left_alone_where_evaluation_is_off(tiny_base: Path, tmp_path: Path) -> None:
    train(tiny_base, config(tmp_path, max_steps=2, eval_strategy="no", save_strategy="no"))
    assert evaluated(tmp_path) == []
    assert saved(tmp_path) == []


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"save_strategy": "steps"}, "save_strategy: steps needs save_steps"),
        (
            {"eval_strategy": "epoch", "eval_steps": 5},
            "eval_steps: 5 has no effect with eval_strategy: epoch",
        ),
        ({"eval_strategy": "no", "early_stopping": {}}, "early_stopping needs evaluations"),
    ],
)
def test_strategies_that_contradict_other_keys_are_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        TrainingConfig(model="gym-nano", **keys)


def test_an_evaluation_strategy_without_held_out_rows_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="eval_strategy: there are no held-out rows"):
        train(tiny_base, config(tmp_path), held_out=None)


def test_rows_are_learned_in_their_order_where_they_are_not_shuffled(tiny_base: Path, tmp_path: Path) -> None:
    settings = config(
        tmp_path, shuffle=False, max_steps=3, save_strategy="no", eval_strategy="no", learning_rate=1e-12
    )
    loaded = load_model(str(tiny_base))
    losses = train(tiny_base, settings).losses
    parts = [ROWS[:4], ROWS[4:8], ROWS[8:]]
    assert losses == pytest.approx(
        [heldout_loss(loaded.model, loaded.tokenizer, part, max_length=64) for part in parts], rel=1e-5
    )
    for algorithm in ("kto", "npo"):
        with pytest.raises(
            GymError, match=f"shuffle: false, but {algorithm} determines the order of its rows"
        ):
            check_config(TrainingConfig(model="gym-nano", algorithm=algorithm, shuffle=False))
