"""``evaluate_only``: figures of held-out rows under a model as it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.evaluation import heldout_loss
from gym_fed.training.evaluating import evaluate
from gym_fed.training.trainer import Trainer

ROWS = generate("twice", 6, seed=5)
"""Rows of a task that gym-nano has not learned: its loss on them is large compared with rounding errors."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in ROWS))
    return file


def config(tmp_path: Path, rows: Path, **changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "model": "gym-nano",
        "eval_data": [{"path": str(rows)}],
        "evaluate_only": True,
        "output_dir": tmp_path / "out",
        "max_length": 64,
        "per_device_train_batch_size": 6,
        "device": "cpu",
        "num_threads": 1,
    }
    return TrainingConfig(**{**values, **changes})


def test_the_loss_is_that_of_an_independent_sum(tmp_path: Path, rows: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(
        f"model: gym-nano\neval_data: [{{path: {rows}}}]\nevaluate_only: true\nmax_length: 64\n"
        f"per_device_train_batch_size: 6\nfinetuning: lora\noutput_dir: {tmp_path}/out\ndevice: cpu\n"
    )
    done = CliRunner().invoke(app, ["train", str(file), "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    loaded = load_model("gym-nano")
    expected = heldout_loss(loaded.model, loaded.tokenizer, ROWS, max_length=64)
    assert figures["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert figures["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    written = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert written["rows"]["learned"] == 6
    assert {key: value for key, value in written.items() if key != "rows"} == figures
    with pytest.raises(GymError, match=r"eval_results\.json already exists") as caught:
        evaluate(config(tmp_path, rows))
    assert caught.value.code is ErrorCode.FILE_EXISTS


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"eval_data": []}, "there are no rows to evaluate on"),
        ({"algorithm": "dpo"}, "dpo compares a model with its initial state"),
        ({"algorithm": "reward_model"}, "reward_model has no metrics for an untrained model"),
    ],
)
def test_what_gives_no_figures_is_refused(
    tmp_path: Path, rows: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GymError, match=problem):
        evaluate(config(tmp_path, rows, **changes))
    with pytest.raises(GymError, match="evaluate_only: nothing to train"):
        Trainer(config(tmp_path, rows, **changes)).train(ROWS)
