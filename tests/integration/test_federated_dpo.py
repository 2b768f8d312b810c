"""Contributors with preference pairs of their own make one model prefer what all of them prefer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model, nano_path
from tests.support.federation import CONFIG, Federation, assert_every_contributor_counts_once_a_round
from tests.support.wait import SECONDS

DPO = {
    "algorithm": "dpo",
    "dpo": {"beta": 0.2},
    "max_steps": 8,
    "per_device_train_batch_size": 8,
    "max_length": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"recipe": {**DPO, "learning_rate": 5e-5}, "codec": {"codec": "bitdelta"}},
    "lora": {
        "recipe": {**DPO, "learning_rate": 2e-3, "finetuning": "lora", "lora": {"r": 4}},
        "codec": {"factors": "bfloat16"},
    },
}


def pairs(seed: int, number: int) -> list[dict[str, Any]]:
    """The same question, answered loudly (chosen) and quietly (rejected)."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(number)]
    return [
        {
            "prompt": [{"role": "user", "content": f"say {word}"}],
            "chosen": [{"role": "assistant", "content": word.upper()}],
            "rejected": [{"role": "assistant", "content": word}],
        }
        for word in words
    ]


@torch.inference_mode()
def mean_margin(source: str, rows: list[dict[str, Any]]) -> float:
    """Mean of log p(chosen) - log p(rejected), in nats."""
    loaded = load_model(source)

    def score(row: dict[str, Any], key: str) -> float:
        prompt = loaded.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        whole = loaded.tokenizer.apply_chat_template(
            [*row["prompt"], *row[key]], return_dict=True, return_tensors="pt"
        )["input_ids"]
        logs = loaded.model(whole).logits[0, :-1].log_softmax(-1)
        at = torch.arange(prompt.shape[1] - 1, whole.shape[1] - 1)
        return float(logs[at, whole[0, at + 1]].sum())

    return sum(score(row, "chosen") - score(row, "rejected") for row in rows) / len(rows)


@pytest.mark.slow  # trains two contributors for two rounds; preferences are learned in the unit tests, too
@pytest.mark.parametrize("case", sorted(CASES))
def test_two_rounds_of_dpo_move_the_margin_of_pairs_nobody_trained_on(case: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, nano_path(), **{**CONFIG, **CASES[case]})
    held_out = pairs(99, 16)
    try:
        federation.hub.start("--exit-when-done")
        for seed, name in enumerate(("ann", "bob")):
            federation.join(name, rows=pairs(seed, 48))
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
        federation.hub.ask("model", str(tmp_path / "tuned"))
    finally:
        federation.close()
    before = mean_margin("gym-nano", held_out)
    after = mean_margin(str(tmp_path / "tuned"), held_out)
    assert after > before + 1.0, (before, after)


def test_rows_without_preferences_are_refused_before_joining(tmp_path: Path) -> None:
    federation = Federation(tmp_path, nano_path(), **{**CONFIG, **CASES["full"]})
    try:
        federation.hub.start()
        process = federation.join("ann")
        assert process.wait(timeout=SECONDS) == 20
        assert "ann.jsonl:1 is a supervised row, but preference rows are needed for dpo" in federation.log(
            "ann"
        )
        assert federation.hub.ask("status")["contributors"] == []
    finally:
        federation.close()


def test_an_algorithm_off_the_contributors_list_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, nano_path(), **{**CONFIG, **CASES["full"]})
    home = tmp_path / "ann"
    home.mkdir()
    (home / "policy.yaml").write_text("algorithms: [sft]\n")
    try:
        federation.hub.start()
        process = federation.join("ann", rows=pairs(0, 8))
        assert process.wait(timeout=SECONDS) != 0
        assert "recipe.algorithm" in federation.log("ann")
        assert "dpo" in federation.log("ann")
    finally:
        federation.close()
