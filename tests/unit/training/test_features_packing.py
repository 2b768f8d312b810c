"""Rows that share a row do not see each other, cost less padding, and teach what they taught alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data import generate
from gym_fed.training.rows.packing import pack_best_fit
from gym_fed.training.rows.run_rows import split_rows
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 24)


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "max_steps": 1,
        "per_device_train_batch_size": 24,
        "max_length": 128,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def test_rows_are_packed_whole_the_fullest_row_first() -> None:
    rows = [{"input_ids": [n] * n, "labels": [-n] * n} for n in (2, 5, 3, 6, 4)]
    packed = pack_best_fit(rows, 8)
    assert sorted(sorted(row["seq_lengths"]) for row in packed) == [[2, 6], [3, 5], [4]]
    for row in packed:
        assert row["input_ids"] == [n for n in row["seq_lengths"] for _ in range(n)]
        assert row["labels"] == [-n for n in row["input_ids"]]


def test_packed_rows_have_the_loss_and_the_gradient_of_separate_ones(tmp_path: Path) -> None:
    losses, models = {}, {}
    for name, changes in (
        ("apart", {}),
        ("packed", {"packing": "bfd", "per_device_train_batch_size": 100}),
        ("joined", {"packing": True, "assistant_only_loss": False, "per_device_train_batch_size": 100}),
    ):
        loaded = load_model("gym-nano")
        result = Trainer(
            config(tmp_path / name, **changes), model=loaded.model, tokenizer=loaded.tokenizer
        ).train(ROWS)
        losses[name], models[name] = result.losses[0], loaded.model
    assert losses["packed"] == pytest.approx(losses["apart"], rel=1e-5)
    assert losses["joined"] != pytest.approx(losses["apart"], rel=1e-2)
    for apart, packed in zip(models["apart"].parameters(), models["packed"].parameters(), strict=True):
        # Adam's first step is the gradient's sign: where the gradient is zero but for rounding it may differ.
        assert torch.isclose(apart, packed, atol=1e-4).float().mean() > 0.99


def test_packed_rows_are_fewer_and_are_evaluated_too(tmp_path: Path) -> None:
    loaded = load_model("gym-nano")
    sft = ALGORITHMS.new("sft")
    encoded = sft.encode(config(tmp_path, packing="bfd"), loaded.tokenizer, ROWS)
    assert len(encoded) < 12
    assert all(row["length"] == sum(row["seq_lengths"]) <= 128 for row in encoded)
    found = {}
    for name, changes in (("apart", {}), ("packed", {"packing": "bfd"})):
        model = load_model("gym-nano")
        settings = config(tmp_path / name, eval_split=0.25, learning_rate=1e-12, **changes)
        result = Trainer(settings, model=model.model, tokenizer=model.tokenizer).train(ROWS)
        found[name] = [entry["eval_loss"] for entry in result.history if "eval_loss" in entry]
        assert result.num_examples == 18
    assert found["packed"] == pytest.approx(found["apart"], rel=1e-4)


def test_rows_are_held_out_by_number_or_share_and_by_the_seed() -> None:
    rows = [{"text": str(i)} for i in range(10)]
    kept, held = split_rows(rows, 0.3, seed=0)
    assert len(held) == 3
    assert sorted(kept + held, key=lambda row: int(row["text"])) == rows
    assert split_rows(rows, 0.3, seed=0) == (kept, held)
    assert split_rows(rows, 3, seed=1)[1] != held
    kept, held = split_rows(rows * 3, 0.3, seed=0)
    assert len(held) == 3
    assert not [row for row in kept if row in held], "a row that weights repeat is learnt and held out"
    assert len(kept) == 21
    for size in (10, 0.01, 0.99):
        with pytest.raises(GymError, match="eval_split"):
            split_rows(rows, size, seed=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"packing": "bfd", "algorithm": "dpo"}, "bfd applies to pretrain and sft"),
        ({"packing": "ffd"}, "bfd"),
        ({"eval_split": 0.1, "eval_data": [{"path": "a.jsonl"}]}, "either eval_data or eval_split"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingConfig(**values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, True),
        ({"train_on_prompt": True}, False),
        ({"packing": "bfd"}, False),
        ({"packing": False}, False),
    ],
)
def test_packing_that_learns_prompts_which_nobody_asked_for_is_said(
    changes: dict[str, Any], said: bool
) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    settings = TrainingConfig(**{"packing": True, **changes})
    rows: list[Any] = [{"messages": turns}, {"text": "a b c"}]
    encoded: Any = ALGORITHMS.new("sft").encode(settings, load_tokenizer("gym-nano"), rows)
    found = any(
        "packing: true also trains on the prompts of 1 of 2 rows" in note for note in encoded.counts.notes
    )
    assert found is said
