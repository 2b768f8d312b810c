"""Rows that are learned again and again are encoded once, and anew when anything about them differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.generated import generate
from gym_fed.training.rows.run_rows import LastEncoded, RunRows, encode_run
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 8)


def _config(tmp_path: Path, **changes: Any) -> TrainingConfig:
    return TrainingConfig(model="gym-nano", output_dir=tmp_path / "run", max_length=64, **changes)


def _encode(last: LastEncoded, config: TrainingConfig, rows: list[Any], tokenizer: Any) -> RunRows:
    return last.encode_run(config, ALGORITHMS.new(config.algorithm), tokenizer, rows, None)


def test_the_same_rows_of_another_round_are_not_encoded_again(tmp_path: Path) -> None:
    tokenizer, last = load_model("gym-nano").tokenizer, LastEncoded()
    first = _encode(last, _config(tmp_path, seed=1, learning_rate=1e-3, max_steps=2), ROWS, tokenizer)
    again = _encode(
        last, _config(tmp_path / "b", seed=2, learning_rate=1e-4, max_steps=3), list(ROWS), tokenizer
    )
    assert again is first


@pytest.mark.parametrize(
    "changes", [{"max_length": 24}, {"assistant_only_loss": False}, {"mask_history": True}]
)
def test_rows_are_encoded_anew_for_other_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokenizer, last = load_model("gym-nano").tokenizer, LastEncoded()
    first = _encode(last, _config(tmp_path), ROWS, tokenizer)
    config = _config(tmp_path).model_copy(update=changes)
    other = _encode(last, config, ROWS, tokenizer)
    assert other is not first
    assert other.encoded == encode_run(config, ALGORITHMS.new("sft"), tokenizer, ROWS, None).encoded


def test_other_rows_and_other_templates_are_encoded_anew(tmp_path: Path) -> None:
    tokenizer, last = load_model("gym-nano").tokenizer, LastEncoded()
    first = _encode(last, _config(tmp_path), ROWS, tokenizer)
    fewer = _encode(last, _config(tmp_path), ROWS[:-1], tokenizer)
    assert len(fewer.encoded) == len(first.encoded) - 1
    tokenizer.chat_template = "{# another #}" + tokenizer.chat_template
    assert _encode(last, _config(tmp_path), ROWS[:-1], tokenizer) is not fewer


def test_a_template_that_prints_the_date_is_never_remembered(tmp_path: Path) -> None:
    tokenizer, last = load_model("gym-nano").tokenizer, LastEncoded()
    tokenizer.chat_template = "{# strftime_now #}" + tokenizer.chat_template
    first = _encode(last, _config(tmp_path), ROWS, tokenizer)
    assert _encode(last, _config(tmp_path), ROWS, tokenizer) is not first


def test_training_on_remembered_rows_learns_what_training_on_fresh_ones_learns(tmp_path: Path) -> None:
    last = LastEncoded()
    losses = []
    for number, remembered in enumerate((last, last, None)):
        config = TrainingConfig(
            model="gym-nano",
            output_dir=tmp_path / str(number),
            max_length=64,
            max_steps=2,
            per_device_train_batch_size=4,
            save_final=False,
            device="cpu",
        )
        losses.append(Trainer(config, last_encoded=remembered).train(ROWS).losses)
    assert losses[0] == losses[1] == losses[2]
