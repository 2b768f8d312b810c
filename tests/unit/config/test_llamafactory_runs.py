"""LLaMA-Factory's files through `gym train`, on its own dataset_info.json and a small model: they run as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import GymError
from tests.unit.interop.test_llamafactory import COMMON

SHORT = {
    "cutoff_len": 64,
    "max_samples": 12,
    "max_steps": 2,
    "logging_steps": 1,
    "gradient_accumulation_steps": 2,
    "template": "chatml",
    "output_dir": "out",
}
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca.jsonl"},
    "c4_demo": {"file_name": "c4.jsonl", "columns": {"prompt": "text"}},
    "dpo_en_demo": {
        "file_name": "dpo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
}


@pytest.fixture
def folder(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data/ as LLaMA-Factory lays it out, and a small model."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text(json.dumps(INFO))
    (data / "identity.json").write_text(
        json.dumps([{"instruction": f"who {i}", "input": "", "output": f"I am {i}"} for i in range(15)])
    )
    lines = [{"instruction": f"say {i}", "input": "it", "output": str(i)} for i in range(15)]
    (data / "alpaca.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (data / "c4.jsonl").write_text("".join(json.dumps({"text": "a text " * 9}) + "\n" for _ in range(15)))
    pairs = [
        {
            "conversations": [{"from": "human", "value": f"ask {i}"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        }
        for i in range(15)
    ]
    (data / "dpo.json").write_text(json.dumps(pairs))
    liked = [
        {
            "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}],
            "label": i % 2 == 0,
        }
        for i in range(15)
    ]
    (data / "kto.json").write_text(json.dumps(liked))
    monkeypatch.setitem(COMMON, "model_name_or_path", str(tiny_base))
    return tmp_path


def train(folder: Path, **changes: Any) -> dict[str, Any]:
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump({**COMMON, **SHORT, **changes}))
    words = ["train", str(file), "--json", "--no-check", "--set", "device=cpu", "--set", "num_threads=1"]
    done = CliRunner().invoke(app, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_supervised_fine_tuning_by_lora(folder: Path) -> None:
    summary = train(folder)
    assert (summary["steps"], summary["num_examples"]) == (2, 24)  # 12 of each file
    assert load_model(str(folder / "out")).model.peft_config["default"].r == 8
    assert load_config(folder / "out/config.yaml", TrainingConfig).mixed_precision == "bf16"


def test_full_fine_tuning_with_rows_held_out_and_packed(folder: Path) -> None:
    summary = train(
        folder,
        finetuning_type="full",
        neat_packing=True,
        neftune_noise_alpha=5,
        val_size=0.25,
        eval_strategy="steps",
        eval_steps=1,
    )
    assert summary["num_examples"] == 18
    assert "eval_loss" in (folder / "out/metrics.jsonl").read_text()


def test_pre_training_with_shifted_attention(folder: Path) -> None:
    assert train(folder, stage="pt", dataset="c4_demo", shift_attn=True)["steps"] == 2


@pytest.mark.parametrize(
    "changes", [{"pref_loss": "sigmoid"}, {"pref_loss": "orpo"}], ids=lambda c: c["pref_loss"]
)
def test_preferences(folder: Path, changes: dict[str, Any]) -> None:
    assert train(folder, stage="dpo", dataset="dpo_en_demo", **changes)["num_examples"] == 12


def test_liked_and_disliked_answers(folder: Path) -> None:
    assert (
        train(folder, stage="kto", dataset="kto_en_demo", per_device_train_batch_size=1)["num_examples"] == 12
    )


def test_a_reward_model_and_then_ppo_with_it(folder: Path) -> None:
    train(folder, stage="rm", dataset="dpo_en_demo", finetuning_type="full", output_dir="reward")
    summary = train(
        folder,
        stage="ppo",
        reward_model="reward",
        max_new_tokens=4,
        per_device_train_batch_size=2,
        ppo_epochs=1,
        dataset="identity",
    )
    assert summary["steps"] == 2


def test_anchored_fine_tuning_beside_the_model_at_the_start(folder: Path) -> None:
    summary = train(folder, use_asft_loss=True, asft_alpha=0.3)
    assert summary["steps"] == 2
    losses = [json.loads(line)["loss"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    plain = train(folder, use_dft_loss=True, output_dir="dft")
    assert plain["steps"] == 2
    others = [json.loads(line)["loss"] for line in (folder / "dft/metrics.jsonl").read_text().splitlines()]
    # The adapter starts at 0, so that there is nothing to diverge from in the first step.
    assert losses[0] == pytest.approx(others[0], rel=1e-4)


def test_what_it_cannot_do_is_said_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(GymError, match="crop_to_patches: no counterpart"):
        train(folder, crop_to_patches=True)
    assert not (folder / "out").exists()


@pytest.mark.shared
def test_the_demonstration_data_of_llamafactory_itself(folder: Path, shared_folder: Path) -> None:
    data = shared_folder / "data/llamafactory_demo"
    train(folder, dataset="identity", dataset_dir=str(data), cutoff_len=96)
    again = {"stage": "dpo", "dataset": "dpo_en_demo", "cutoff_len": 96, "output_dir": "dpo"}
    done = train(folder, dataset_dir=str(data), **again)
    assert (done["rows"]["rows"], done["rows"]["dropped"]) == (12, 10)  # prompts of more than 96 tokens
    assert done["num_examples"] == done["rows"]["learned"] == 2
