"""Learning from preferences: margins grow, runs repeat and resume to the bit, and nothing is left on the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.data.row_counts import counts_of
from gym_fed.data.rows import as_kind
from gym_fed.training.trainer import Trainer
from tests.support.preferences import (
    HELD_OUT,
    ROWS,
    assert_same,
    capitals,
    config,
    margins,
    train,
    weights,
)
from tests.support.quick import quick

POLICIES = ("dpo", "kto", "orpo", "simpo", "tdpo")
ALL = (*POLICIES, "reward_model")


@pytest.mark.parametrize("finetuning", quick(["full", "lora"], "full"))
@pytest.mark.parametrize("algorithm", POLICIES)
def test_the_chosen_kind_of_answer_becomes_likelier_on_pairs_never_seen(
    tiny_base: Path, tmp_path: Path, algorithm: str, finetuning: str
) -> None:
    loaded = load_model(str(tiny_base))
    before = margins(loaded.model, loaded.tokenizer, HELD_OUT)
    sections: dict[str, Any] = {"orpo": {"beta": 4.0}} if algorithm == "orpo" else {}
    if finetuning == "lora":
        sections["lora"] = {"r": 16, "lora_alpha": 32}
    settings = config(
        tmp_path / "run", algorithm, finetuning=finetuning, max_steps=16, learning_rate=2e-2, **sections
    )
    result = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS, HELD_OUT)
    after = margins(result.model, result.tokenizer, HELD_OUT)
    assert (before > 0).float().mean() <= 0.5
    assert (after > 0).float().mean() > 0.85
    # The adapter of a single random layer moves the logits of a tied head by little.
    assert after.mean() > before.mean() + (0.5 if finetuning == "full" else 0.04)
    noted = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert noted[-1] > noted[0]
    held_out = [entry for entry in result.history if "eval_loss" in entry]
    assert held_out
    assert held_out[-1]["eval_rewards/margins"] > 0.02
    assert result.num_tokens > 0


@pytest.mark.parametrize("algorithm", quick(ALL, "dpo", "kto", "reward_model"))
def test_the_same_seed_gives_the_same_weights_and_so_does_a_resumed_run(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    whole = train(tiny_base, config(tmp_path / "whole", algorithm))
    again = train(tiny_base, config(tmp_path / "again", algorithm))
    other = train(tiny_base, config(tmp_path / "other", algorithm, seed=1))
    assert_same(weights(whole.model), weights(again.model))
    assert whole.losses == again.losses != other.losses
    resumed = interrupted(tiny_base, tmp_path / "part", algorithm)
    assert resumed.losses == whole.losses
    assert resumed.num_tokens == whole.num_tokens
    assert_same(weights(whole.model), weights(resumed.model))


@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_an_adapter_resumes_to_the_same_bits(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    whole = train(tiny_base, config(tmp_path / "whole", algorithm, finetuning="lora"))
    resumed = interrupted(tiny_base, tmp_path / "part", algorithm, finetuning="lora")
    assert resumed.losses == whole.losses
    assert_same(weights(whole.model), weights(resumed.model))


def interrupted(tiny_base: Path, folder: Path, algorithm: str, **changes: Any) -> Any:
    seen: list[int] = []
    settings = config(folder, algorithm, **changes)
    with pytest.raises(GymError, match="stopped at step 3 of 6"):
        train(
            tiny_base,
            settings,
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 3,
        )
    return train(tiny_base, settings)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_reference_scored_beforehand_is_the_frozen_copy(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    runs = [
        train(tiny_base, config(tmp_path / str(wanted), algorithm, **{algorithm: section}))
        for wanted, section in (
            (None, {}),
            (True, {"precompute_ref_log_probs": True}),
            (False, {"precompute_ref_log_probs": False}),
        )
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses == pytest.approx(runs[2].losses, abs=1e-4)
    assert runs[0].losses[-1] < runs[0].losses[0] - 0.01, "the reference must stay where it was"


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "tdpo"])
def test_an_adapters_reference_is_the_model_without_it_and_no_second_adapter_is_made(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    settings = config(tmp_path / "run", algorithm, finetuning="lora", save_final=True, save_steps=3)
    result = train(tiny_base, settings)
    assert list(result.model.peft_config) == ["default"]
    saved = [file.parent.name for file in (tmp_path / "run").rglob("adapter_model.safetensors")]
    assert sorted(saved) == ["checkpoint-3", "checkpoint-6", "run"]
    noted = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert noted[0] == 0, "the adapter begins as its base"
    assert abs(noted[-1]) > 1e-4, "the reference must not move with the adapter"


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_an_adapter_that_begins_off_its_base_is_held_against_its_own_start(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    pissa = {"finetuning": "lora", "lora": {"r": 4, "init_lora_weights": "pissa"}}
    result = train(tiny_base, config(tmp_path / "run", algorithm, **pissa))
    assert abs(result.history[0]["rewards/margins"]) < 1e-4
    copied = {algorithm: {"precompute_ref_log_probs": False}}
    beside = train(tiny_base, config(tmp_path / "copy", algorithm, **pissa, **copied))
    assert beside.losses == pytest.approx(result.losses, abs=1e-4), (
        "the same reference, kept beside the policy"
    )


def test_tdpo_holds_an_adapter_that_begins_off_its_base_against_a_copy_of_its_start(
    tiny_base: Path, tmp_path: Path
) -> None:
    pissa = {"finetuning": "lora", "lora": {"r": 4, "init_lora_weights": "pissa"}}
    result = train(tiny_base, config(tmp_path / "run", "tdpo", **pissa))
    noted = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert abs(noted[0]) < 1e-4
    assert abs(noted[-1]) > 1e-4, "the copy does not move with the adapter"


def test_one_model_in_memory_takes_one_algorithm_after_another_and_is_left_clean(
    tiny_base: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_base))
    for algorithm in (*POLICIES, "dpo"):
        settings = config(tmp_path / str(len(list(tmp_path.iterdir()))), algorithm, max_steps=2)
        result = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
        assert result.model is loaded.model
        assert "forward" not in vars(loaded.model)
        assert not loaded.model.model_tags
        assert not loaded.model.training
        assert all(p.grad is None for p in loaded.model.parameters())


def test_a_run_after_another_algorithm_is_the_run_that_it_would_have_been(
    tiny_base: Path, tmp_path: Path
) -> None:
    fresh = train(tiny_base, config(tmp_path / "fresh", "orpo", max_steps=3))
    loaded = load_model(str(tiny_base))
    before = weights(loaded.model)
    Trainer(config(tmp_path / "a", "dpo"), model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
    loaded.model.load_state_dict(before)
    settings = config(tmp_path / "b", "orpo", max_steps=3)
    later = Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)
    assert later.losses == fresh.losses


@pytest.mark.parametrize("algorithm", quick(ALL, "orpo", "reward_model"))
def test_nothing_is_reported_to_a_hub_and_no_card_is_written(
    tiny_base: Path,
    tmp_path: Path,
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *a, **k: sent.append(a))
    monkeypatch.delenv("CI", raising=False)
    train(tiny_base, config(tmp_path / "run", algorithm, max_steps=1, save_steps=1, save_final=True))
    assert sent == []
    assert not list((tmp_path / "run").rglob("README.md"))
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 1
    assert "it/s" not in capfd.readouterr().err, "bars of a library on what is no terminal"


@pytest.mark.parametrize("disable", [True, False])
def test_dropout_is_off_while_training_unless_asked_for_and_is_as_it_was_afterwards(
    tiny_base: Path, tmp_path: Path, disable: bool
) -> None:
    adapter = {"finetuning": "lora", "lora": {"lora_dropout": 0.5}}
    if disable:
        with pytest.raises(GymError, match=r"lora\.lora_dropout: dpo disables dropout"):
            train(tiny_base, config(tmp_path / "run", "dpo", **adapter))
        return
    result = train(tiny_base, config(tmp_path / "run", "dpo", **adapter, dpo={"disable_dropout": False}))
    plain = train(tiny_base, config(tmp_path / "plain", "dpo", finetuning="lora"))
    assert result.losses != plain.losses
    dropouts = [module.p for module in result.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts
    assert set(dropouts) == {0.5}


@pytest.mark.shared
@pytest.mark.parametrize("algorithm", quick(POLICIES, "dpo", "simpo"))
def test_a_model_without_chat_template_learns_from_plain_texts(
    shared_folder: Path, tmp_path: Path, algorithm: str
) -> None:
    rows = capitals(32, 0, chat=False)
    settings = config(tmp_path / "run", algorithm, learning_rate=1e-3, max_steps=8)
    result = train(shared_folder / "models/stories260K", settings, rows)
    noted = [entry["rewards/margins"] for entry in result.history if "rewards/margins" in entry]
    assert noted[-1] > noted[0]


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "orpo", "reward_model"])
def test_how_many_rows_do_not_fit_is_counted(tiny_base: Path, algorithm: str) -> None:
    tokenizer = load_model(str(tiny_base)).tokenizer
    rows = [{"prompt": "a b " * size, "chosen": "c", "rejected": "d"} for size in (1, 1, 1, 90)]
    settings = config(Path("run"), algorithm, max_length=32)
    learner = ALGORITHMS.new(algorithm)
    for part, dropped in ((rows[:3], 0), (rows, 2 if algorithm == "kto" else 1)):
        given = as_kind(part, learner.row_kind)
        counts = counts_of(learner.encode(settings, tokenizer, given), len(given))
        assert (counts.dropped, counts.learned) == (dropped, len(given) - dropped)
