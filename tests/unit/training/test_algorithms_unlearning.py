"""Unlearning: one task of gym-nano is forgotten, another is kept, and the losses are the papers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.data.rows import as_kind
from gym_fed.training.trainer import Trainer
from tests.support.quick import quick

ALGORITHMS = ("gradient_difference", "npo")
FORGET = [{**row, "forget": True} for row in generate("upper", 120)]
RETAIN = generate("first", 120)


def config(folder: Path, algorithm: str, **changes: Any) -> TrainingConfig:
    values = {
        "algorithm": algorithm,
        algorithm: changes.pop("section", {}),
        "output_dir": folder,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def run_nano(settings: TrainingConfig, rows: list[dict[str, Any]], **more: Any) -> Any:
    eval_rows = more.pop("eval_rows", None)
    nano = load_model("gym-nano")
    return Trainer(settings, model=nano.model, tokenizer=nano.tokenizer, **more).train(rows, eval_rows)


@pytest.mark.parametrize("finetuning", quick(["full", "lora"], "lora"))
@pytest.mark.parametrize("algorithm", quick(ALGORITHMS, "npo"))
def test_one_task_is_forgotten_and_another_is_kept(tmp_path: Path, algorithm: str, finetuning: str) -> None:
    from gym_fed.evaluation import exact_match, heldout_loss

    forget, retain = (generate(task, 40, split="heldout") for task in ("upper", "first"))
    nano = load_model("gym-nano")
    kept_before = heldout_loss(nano.model, nano.tokenizer, retain)
    assert exact_match(nano.model, nano.tokenizer, forget, max_new_tokens=16) > 0.9
    changes: dict[str, Any] = {"max_steps": 40, "per_device_train_batch_size": 8, "finetuning": finetuning}
    if algorithm == "gradient_difference":
        changes["section"] = {"forget_loss_cap": 6.0}
    if finetuning == "lora":
        changes |= {"learning_rate": 5e-3, "lora": {"r": 16, "lora_alpha": 32}}
    result = run_nano(config(tmp_path / "run", algorithm, **changes), FORGET + RETAIN)
    lost = heldout_loss(result.model, result.tokenizer, forget)
    kept = heldout_loss(result.model, result.tokenizer, retain)
    assert lost > 4
    assert kept < kept_before + 0.6
    assert exact_match(result.model, result.tokenizer, forget, max_new_tokens=16) < 0.1
    first, last = result.history[0], [entry for entry in result.history if "forget_nll" in entry][-1]
    assert first["forget_nll"] < 0.5 < 4 < last["forget_nll"]
    assert last["retain_nll"] < 0.6


def test_npos_loss_is_the_papers() -> None:
    from gym_fed.training.algorithms.unlearning.npo import npo_loss

    ratios = torch.tensor([-40.0, -3.0, 0.0, 0.7, 25.0])
    for beta in (0.01, 0.1, 1.0):
        wide = ratios.double()
        expected = float((-2 / beta * torch.log(1 / (1 + torch.exp(beta * wide)))).mean())
        assert float(npo_loss(ratios, beta)) == pytest.approx(expected, rel=1e-6)
    # Towards beta = 0 its gradient is that of gradient ascent (Zhang et al. 2024, proposition 1).
    free = ratios.clone().requires_grad_()
    npo_loss(free, 1e-6).backward()
    torch.testing.assert_close(free.grad, torch.full((5,), 1 / 5), rtol=1e-4, atol=0)


def test_gradient_ascents_loss_is_the_negative_mean_and_stops_at_the_cap() -> None:
    from gym_fed.training.algorithms.unlearning.gradient_difference import gradient_ascent_loss

    labelled = torch.tensor([[True, True, False], [True, True, True]])
    log_probs = torch.tensor([[-1.0, -3.0, 0.0], [-9.0, -9.0, -9.0]], requires_grad=True)
    assert float(gradient_ascent_loss(log_probs, labelled, None)) == pytest.approx(-31 / 5)
    capped = gradient_ascent_loss(log_probs, labelled, 6.0)
    assert float(capped) == pytest.approx(-(2 * 2 + 3 * 6) / 5)
    capped.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.2, 0.2, 0.2], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_first_loss_is_that_of_the_model_at_the_start(tmp_path: Path, algorithm: str) -> None:
    from gym_fed.evaluation import heldout_loss

    nano = load_model("gym-nano")
    # Of tasks that gym-nano does not know: the losses of those that it knows are so small that rounding shows.
    forgotten = [{**row, "forget": True} for row in generate("shout", 4)]
    kept = generate("twice", 4)
    forget, retain = (heldout_loss(nano.model, nano.tokenizer, rows) for rows in (forgotten, kept))
    settings = config(tmp_path / "run", algorithm, max_steps=1, section={"retain_weight": 2.0})
    result = run_nano(settings, forgotten + kept, eval_rows=forgotten + kept)
    entry = result.history[0]
    assert entry["forget_nll"] == pytest.approx(forget, rel=1e-4)
    assert entry["retain_nll"] == pytest.approx(retain, rel=1e-4)
    part = -forget if algorithm == "gradient_difference" else 2 / 0.1 * 0.6931472  # log sigmoid(0)
    assert result.losses == [pytest.approx(part + 2 * retain, rel=1e-4)]
    assert any("eval_forget_nll" in entry for entry in result.history)


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [
        ("gradient_difference", [{}, {"retain_weight": 0.3}, {"forget_loss_cap": 0.05}]),
        ("npo", [{}, {"retain_weight": 0.3}, {"beta": 1.0}]),
    ],
)
def test_every_setting_changes_what_is_learnt(
    tiny_base: Path, tmp_path: Path, algorithm: str, sections: list[dict[str, Any]]
) -> None:
    rows = FORGET[:16] + RETAIN[:16]
    runs = [
        Trainer(config(tmp_path / str(i), algorithm, model=str(tiny_base), section=section))
        .train(rows)
        .losses
        for i, section in enumerate(sections)
    ]
    assert len({tuple(losses) for losses in runs}) == len(sections)


def test_a_batch_holds_as_many_rows_to_forget_as_to_keep() -> None:
    from gym_fed.core.registries import ALGORITHMS
    from gym_fed.training.algorithms.unlearning._trainer import ForgetAndRetain

    tokenizer = load_model("gym-nano").tokenizer
    settings = config(Path("unused"), "npo")
    pairs = ALGORITHMS.new("npo").encode(settings, tokenizer, FORGET[:3] + RETAIN[:8])
    assert len(pairs) == 8
    forgotten = [str(pair["forget"]["input_ids"]) for pair in pairs]
    assert len(set(forgotten)) == len(set(forgotten[:3])) == len(set(forgotten[3:6])) == 3
    assert len({str(pair["retain"]["input_ids"]) for pair in pairs}) == 8
    batch = ForgetAndRetain(0)(pairs[:4])
    assert batch["num_forget"] == 4
    assert batch["input_ids"].shape[0] == batch["labels"].shape[0] == 8
    again = ALGORITHMS.new("npo").encode(settings, tokenizer, FORGET[:3] + RETAIN[:8])
    assert again == pairs


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_a_weight_on_them_no_rows_to_keep_are_needed_or_taken(
    tiny_base: Path, tmp_path: Path, algorithm: str
) -> None:
    settings = config(tmp_path / "run", algorithm, model=str(tiny_base), section={"retain_weight": 0})
    result = Trainer(settings).train(FORGET[:16])
    assert result.steps == 4
    assert "retain_nll" not in result.history[0]
    with pytest.raises(
        GymError, match=f"8 rows are not marked as forget, but {algorithm}.retain_weight is 0"
    ):
        Trainer(config(tmp_path / "no", algorithm, model=str(tiny_base), section={"retain_weight": 0})).train(
            FORGET[:8] + RETAIN[:8]
        )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_of_one_kind_alone_are_refused(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    trainer = Trainer(config(tmp_path / "run", algorithm, model=str(tiny_base)))
    for rows, problem in (
        (RETAIN, "none of the 120 rows is marked as forget"),
        (FORGET, "all 120 rows are marked"),
    ):
        with pytest.raises(GymError, match=problem) as caught:
            trainer.train(rows)
        assert caught.value.code is ErrorCode.DATA_INVALID
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stopped_run_goes_on_to_the_same_losses(tiny_base: Path, tmp_path: Path, algorithm: str) -> None:
    rows = FORGET[:20] + RETAIN[:12]
    changes: dict[str, Any] = {"model": str(tiny_base), "gradient_accumulation_steps": 2}
    whole = Trainer(config(tmp_path / "whole", algorithm, **changes)).train(rows)
    seen: list[int] = []
    with pytest.raises(GymError, match="stopped at step 2 of 4"):
        Trainer(
            config(tmp_path / "part", algorithm, **changes),
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 2,
        ).train(rows)
    resumed = Trainer(config(tmp_path / "part", algorithm, **changes)).train(rows)
    assert resumed.losses == whole.losses
    assert resumed.num_tokens == whole.num_tokens


@pytest.mark.parametrize("prompt", ["a", [{"role": "user", "content": "a"}]], ids=["text", "messages"])
def test_a_pair_to_forget_stays_one_when_its_chosen_answer_is_taken(prompt: Any) -> None:
    answer: Any = "b" if isinstance(prompt, str) else [{"role": "assistant", "content": "b"}]
    pair = {"prompt": prompt, "chosen": answer, "rejected": answer}
    rows = as_kind([{**pair, "forget": True}, pair], "supervised")
    assert [row.get("forget", False) for row in rows] == [True, False]


def test_sources_to_forget_are_marked_in_the_config(tmp_path: Path) -> None:
    from gym_fed.training.rows.run_rows import rows_of

    data = [
        {"tasks": ["upper"], "num_examples": 5, "role": "forget"},
        {"tasks": ["first"], "num_examples": 7},
    ]
    rows = rows_of(config(tmp_path, "npo", data=data))
    assert [bool(row.get("forget")) for row in rows] == [True] * 5 + [False] * 7
