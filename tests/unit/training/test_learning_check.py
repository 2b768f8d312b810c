"""What a run gained and lost: measured before the first step and after the last, and reported with remedies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core import progress
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.evaluation import retention
from gym_fed.evaluation.generation import greedy_ids
from gym_fed.training.run.check import LearningCheck, Measurement, answer_of, prompt_of
from gym_fed.training.run.reward_warnings import reward_warnings
from gym_fed.training.trainer import Trainer

DOUBLE = generate("double", 200)
FEW = DOUBLE[:60]


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "model": "gym-nano",
        "output_dir": folder,
        "device": "cpu",
        "num_threads": 1,
        "max_steps": 30,
        "per_device_train_batch_size": 4,
        "max_length": 64,
    }
    return TrainingConfig(**{**values, **changes})


@pytest.fixture(autouse=True)
def _few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """General knowledge is measured on 12 items instead of 120, except by ``learned``."""
    monkeypatch.setattr(retention, "_NANO_ITEMS", 12)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """gym-nano learns one new task, at a rate that makes it forget its others."""
    folder = tmp_path_factory.mktemp("learned")
    changes = {"max_steps": 30, "per_device_train_batch_size": 16, "learning_rate": 4e-3}
    trainer = Trainer(config(folder / "run", **changes), check=True)
    return trainer, trainer.train(DOUBLE)


def test_both_measurements_show_a_count_and_how_to_skip_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.02)
    Trainer(config(tmp_path / "run", max_steps=1), check=True).train(DOUBLE[:40])
    printed = capsys.readouterr().err

    for what in ("the model before its first step", "the trained model"):
        counts = re.findall(rf"measuring {what}: (\d+) of (\d+)", printed)
        assert len(set(counts)) > 1, printed
        assert re.search(rf"measuring {what}.*; --no-check skips it", printed), printed


def test_both_measurements_count_up_to_their_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[progress.Activity] = []

    @contextmanager
    def recorded(what: str, hint: str = "") -> Iterator[progress.Activity]:
        with progress.spinner(what, hint) as activity:
            yield activity
        shown.append(activity)

    monkeypatch.setattr("gym_fed.training.run.check.spinner", recorded)
    result = Trainer(config(tmp_path / "run", max_steps=1), check=True).train(DOUBLE[:40])
    assert result.check is not None
    assert result.check.prompts
    assert len(shown) == 2
    assert all(one._done == one._total > 0 for one in shown), [(one._done, one._total) for one in shown]


def test_rows_are_held_out_and_their_loss_falls(learned: Any) -> None:
    trainer, result = learned
    held = result.check.held_out

    assert trainer.config.eval_split == held.num_rows >= 4
    assert held.after < held.before - 2 * held.stderr


def test_a_loss_of_what_the_model_knew_is_a_warning_with_remedies(learned: Any) -> None:
    _, result = learned

    assert result.check.retention.is_lost
    warning = next(text for text in result.check.warnings if "general knowledge" in text)
    for remedy in ("learning_rate", "finetuning: lora", "ordinary conversations"):
        assert remedy in warning


def test_prompts_of_held_out_rows_are_answered_before_and_after(learned: Any) -> None:
    _, result = learned
    check = result.check

    assert len(check.prompts) == len(check.before) == len(check.after) == 3
    assert all(prompt.startswith("double: ") for prompt in check.prompts)
    assert check.before != check.after
    answers = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in DOUBLE}
    assert check.expected == [answers[prompt] for prompt in check.prompts]
    assert sum(answers[p] == a for p, a in zip(check.prompts, check.after, strict=True)) >= 1


def test_the_result_of_the_check_is_in_the_run_folder(learned: Any) -> None:
    _, result = learned
    stored = json.loads((result.output_dir / "result.json").read_text(encoding="utf-8"))

    assert stored["check"]["held_out"]["after"] == result.check.held_out.after
    assert stored["check"]["retention"]["is_lost"] is True


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="full", marks=pytest.mark.slow),
        pytest.param(
            {"finetuning": "lora", "lora": {"lora_dropout": 0.3}}, id="dropout", marks=pytest.mark.slow
        ),
        pytest.param(
            {"packing": "bfd", "finetuning": "lora", "lora": {"lora_dropout": 0.3}}, id="evaluated first"
        ),
    ],
)
def test_training_by_a_check_ends_with_the_losses_of_a_run_without_one(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    values = {"eval_split": 12, "max_steps": 4, **changes}
    checked = Trainer(config(tmp_path / "a", **values), check=True).train(FEW)
    unchecked = Trainer(config(tmp_path / "b", **values)).train(FEW)

    assert checked.losses == unchecked.losses
    assert unchecked.check is None


def test_a_resumed_run_is_compared_with_where_it_began(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", max_steps=8, save_steps=4, learning_rate=2e-3)
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) == 5

    with pytest.raises(GymError, match="stopped at step 5"):
        Trainer(settings, check=True, should_stop=stop).train(FEW)
    before = json.loads((tmp_path / "run" / "check.json").read_text(encoding="utf-8"))
    result = Trainer(settings, check=True).train(FEW)
    whole = Trainer(
        config(tmp_path / "whole", max_steps=8, save_steps=4, learning_rate=2e-3), check=True
    ).train(FEW)

    assert result.check.before == Measurement(**before).shown_answers
    assert result.check.as_dict() == whole.check.as_dict()


def test_an_answer_that_was_cut_is_shown_with_an_ellipsis() -> None:
    measured = Measurement(answers=["It is. ", "However, the most widely accepted "], ended=[True, False])
    assert measured.shown_answers == ["It is. ", "However, the most widely accepted …"]


def test_another_run_in_the_folder_of_one_that_did_not_begin_is_measured_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}", encoding="utf-8")
    (folder / "check.json").write_text(json.dumps({"answers": ["stale"]}), encoding="utf-8")
    result = Trainer(config(folder, max_steps=1), check=True).train(FEW)

    assert "stale" not in result.check.before


def test_preferences_are_judged_by_the_loss_of_their_algorithm(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [row["messages"][0]],
            "chosen": [row["messages"][1]],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for row in FEW
    ]
    result = Trainer(
        config(tmp_path / "run", algorithm="dpo", max_steps=6, learning_rate=1e-4), check=True
    ).train(rows)

    assert result.check.held_out.before == pytest.approx(0.6931, abs=1e-3)
    assert result.check.held_out.after < result.check.held_out.before


def test_texts_are_checked_without_prompts(tmp_path: Path) -> None:
    rows = [{"text": row["messages"][0]["content"]} for row in FEW]
    check = Trainer(config(tmp_path / "run", max_steps=2), check=True).train(rows).check

    assert check.prompts == []
    assert check.held_out.num_rows == 6


def test_too_few_rows_are_all_learned(tmp_path: Path) -> None:
    result = Trainer(config(tmp_path / "run", max_steps=1), check=True).train(DOUBLE[:10])

    assert result.check.held_out is None
    assert result.num_examples == 10


def test_answers_that_never_end_are_a_warning(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"go {n}"}, {"role": "assistant", "content": "la " * 40}]}
        for n in range(40)
    ]
    check = (
        Trainer(config(tmp_path / "run", max_steps=20, max_length=48, learning_rate=4e-3), check=True)
        .train(rows)
        .check
    )

    assert any("may not stop" in text for text in check.warnings)


def test_a_reward_model_is_judged_by_its_loss_alone(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [row["messages"][0]],
            "chosen": [row["messages"][1]],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for row in DOUBLE[:40]
    ]
    settings = config(tmp_path / "run", algorithm="reward_model", max_steps=2)
    check = Trainer(settings, check=True).train(rows).check

    assert check.held_out is not None
    assert check.retention is None
    assert "a reward model generates no text" in check.skipped[0]


HISTORY = [{"completions/clipped_ratio": 0.87, "reward_std": 0.4, "frac_reward_zero_std": 0.75}] * 4
"""The answers to one prompt have equal rewards, and those to another prompt other ones, so all together have spread."""


def test_truncated_answers_without_spread_of_rewards_are_warned_of() -> None:
    settings = TrainingConfig(
        model="gym-nano", algorithm="grpo", graders=[{"grader": "exact"}], grpo={"max_completion_length": 24}
    )
    found = reward_warnings(settings, HISTORY)

    assert len(found) == 2
    assert "87%" in found[0]
    assert "grpo.max_completion_length = 24" in found[0]
    assert "for 75% of the prompts" in found[1]
    assert "num_generations" in found[1]


def test_a_run_of_rewards_that_learns_is_not_warned_of() -> None:
    settings = TrainingConfig(model="gym-nano", algorithm="grpo", graders=[{"grader": "exact"}])
    assert (
        reward_warnings(settings, [{"completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.25}] * 4)
        == []
    )


def test_equal_rewards_of_answers_that_became_good_or_that_stand_alone_are_not_warned_of() -> None:
    flat = [{"frac_reward_zero_std": 0.75, "reward": reward} for reward in (0.0, 0.0, 1.0, 1.0)]
    settings = TrainingConfig(model="gym-nano", algorithm="grpo", graders=[{"grader": "exact"}])
    assert reward_warnings(settings, flat) == []
    assert len(reward_warnings(settings, [{**entry, "reward": 0.5} for entry in flat])) == 1
    assert len(reward_warnings(settings, [{"frac_reward_zero_std": 1.0, "reward": 1.0}])) == 1
    alone = TrainingConfig(model="gym-nano", algorithm="ppo", graders=[{"grader": "exact"}])
    assert reward_warnings(alone, [{"frac_reward_zero_std": 1.0}] * 4) == []


def test_a_real_run_of_rewards_whose_answers_are_all_cut_says_so(tmp_path: Path) -> None:
    rows = [
        {"prompt": row["messages"][:1], "answer": row["messages"][1]["content"], "aliases": ["x"]}
        for row in generate("copy", 8)
    ]
    settings = config(
        tmp_path / "run",
        algorithm="grpo",
        max_steps=2,
        per_device_train_batch_size=4,
        graders=[{"grader": "exact"}],
        grpo={"num_generations": 4, "max_completion_length": 1},
    )
    check = Trainer(settings, check=True).train(rows).check

    assert any("max_completion_length = 1" in text for text in check.warnings)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a", "completion": "b"}, "a"),
        ({"text": "a"}, None),
        ({"messages": [{"role": "user", "content": "a"}]}, None),
        ({"prompt": "a", "tools": [{}]}, None),
        ({"input_ids": [1], "labels": [1]}, None),
    ],
)
def test_only_rows_that_ask_something_have_a_prompt(row: dict[str, Any], prompt: Any) -> None:
    assert prompt_of(row) == prompt


def test_a_greedy_answer_says_whether_it_ended() -> None:
    nano = load_model("gym-nano")
    from gym_fed.data.encoding import prompt_ids

    prompt = prompt_ids(nano.tokenizer, [{"role": "user", "content": "copy: abc"}])
    whole, cut = (
        greedy_ids(nano.model, nano.tokenizer, [prompt], max_new_tokens=most)[0] for most in (32, 1)
    )

    assert whole.ended
    assert nano.tokenizer.decode(whole.ids) == "abc"
    assert not cut.ended
    assert cut.ids == whole.ids[:1]


def test_a_stop_in_the_last_step_leaves_the_check_out_and_keeps_the_model(tmp_path: Path) -> None:
    result = Trainer(config(tmp_path, max_steps=1), should_stop=lambda: True, check=True).train(FEW)
    assert result.check is not None
    assert result.check.skipped == ["the trained model: stopped by a signal"]
    assert result.check.after == []
    assert (tmp_path / "model.safetensors").is_file()


def test_a_stop_while_prompts_are_answered_ends_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    real = progress.Activity.report

    def counted(self: progress.Activity, done: int, total: int, name: str | None = None) -> None:
        real(self, done, total, name)
        if self._name.startswith("answering"):
            counts.append(done)

    def stops() -> bool:
        return counts[-1:] == [2] and counts.count(2) == 2  # the second token of the second measurement

    monkeypatch.setattr(progress.Activity, "report", counted)
    result = Trainer(config(tmp_path, max_steps=1), should_stop=stops, check=True).train(FEW)
    assert result.check is not None
    assert result.check.skipped == ["the trained model: stopped by a signal"]
    assert result.check.after == []
    assert counts[-3:] == [0, 1, 2]


def test_the_weights_are_there_when_the_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LearningCheck._answers
    calls: list[int] = []

    def fails_after_training(self: LearningCheck, *given: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(LearningCheck, "_answers", fails_after_training)
    result = Trainer(config(tmp_path / "run", max_steps=1), check=True).train(FEW)

    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "result.json").is_file()
    assert result.check.skipped == ["the trained model: stopped by a signal"]


def test_held_out_rows_are_measured_as_the_run_encodes_them(tmp_path: Path) -> None:
    rows = [{"messages": row["messages"]} for row in FEW]
    settings = config(tmp_path / "run", max_steps=1, assistant_only_loss=False)
    trainer = Trainer(settings, check=True)
    check = trainer.train(rows).check
    whole = Trainer(config(tmp_path / "other", max_steps=1), check=True).train(rows).check

    assert check.held_out.before != pytest.approx(whole.held_out.before, abs=0.05)


def test_answers_stay_within_the_context_of_the_model(tmp_path: Path) -> None:
    """gym-nano reads 256 tokens; prompts of nearly as many leave hardly any room."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n} " + "x" * 200},
                {"role": "assistant", "content": "y" * 30},
            ]
        }
        for n in range(30)
    ]
    check = Trainer(config(tmp_path / "run", max_steps=1, max_length=256), check=True).train(rows).check

    assert check.skipped == []


def test_a_run_that_forgets_as_requested_is_not_said_to_have_learned_by_heart(tmp_path: Path) -> None:
    rows = [{**row, "forget": index % 2 == 0} for index, row in enumerate(generate("copy", 60))]
    rows = [{key: value for key, value in row.items() if key != "forget" or value} for row in rows]
    settings = config(tmp_path / "run", algorithm="npo", max_steps=6, learning_rate=2e-3, eval_split=10)
    check = Trainer(settings, check=True).train(rows).check

    assert not any("has memorised its rows" in text for text in check.warnings)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "a", "answer": ["b", "c"]}, "c"),
        ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "b"),
        ({"prompt": "a", "answer": 4}, ""),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, ""),
    ],
)
def test_a_rows_own_answer_is_found_in_any_form(row: dict[str, Any], answer: str) -> None:
    assert answer_of(row) == answer
