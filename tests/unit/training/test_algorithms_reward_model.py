"""Reward models: a body under another head, that learns which answer is preferred and is loaded as a grader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ALGORITHMS
from gym_fed.evaluation.graders.base import Sample
from gym_fed.evaluation.graders.reward_model import RewardModelConfig, RewardModelGrader
from gym_fed.training.model.critic import load_critic
from gym_fed.training.rows.answers import encode_answers
from gym_fed.training.trainer import Trainer
from tests.support.preferences import HELD_OUT, ROWS, assert_same, capitals, config, weights


def scores(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """``[n, 2]``: what chosen and rejected answers are worth, one conversation at a time."""
    values = []
    for row in encode_answers(tokenizer, rows, ("chosen", "rejected")):
        for key in ("chosen_ids", "rejected_ids"):
            with torch.no_grad():
                values.append(model(input_ids=torch.tensor([row["prompt_ids"] + row[key]])).logits[0, 0])
    return torch.stack(values).view(-1, 2)


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_preferred_answers_score_higher_on_pairs_never_seen_and_in_the_grader(
    tiny_base: Path, tmp_path: Path, finetuning: str
) -> None:
    folder = tmp_path / "run"
    settings = config(
        folder,
        "reward_model",
        model=str(tiny_base),
        finetuning=finetuning,
        max_steps=24,
        learning_rate=2e-2,
        save_final=True,
    )
    result = Trainer(settings).train(ROWS, HELD_OUT)
    trained = scores(result.model, result.tokenizer, HELD_OUT)
    assert (trained[:, 0] > trained[:, 1]).float().mean() > 0.9
    held_out = [entry for entry in result.history if "eval_loss" in entry]
    assert held_out[-1]["eval_accuracy"] > 0.9
    assert held_out[-1]["eval_loss"] < 0.5
    grader = RewardModelGrader(RewardModelConfig(grader="reward_model", model=str(folder), device="cpu"))
    grader.setup()
    samples = [
        Sample(row["prompt"], row[key][0]["content"]) for row in HELD_OUT for key in ("chosen", "rejected")
    ]
    graded = torch.tensor(grader.grade(samples)).view(-1, 2)
    torch.testing.assert_close(graded, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_a_finished_run_writes_no_answers_and_is_a_critic(
    tiny_base: Path, tmp_path: Path, finetuning: str
) -> None:
    settings = config(
        tmp_path / "run",
        "reward_model",
        model=str(tiny_base),
        finetuning=finetuning,
        max_steps=1,
        save_final=True,
    )
    Trainer(settings).train(ROWS)
    with pytest.raises(
        GymError, match="is a reward model, which scores answers and generates none"
    ) as caught:
        load_model(str(tmp_path / "run"))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    policy = load_model(str(tiny_base)).model
    load_critic(str(tmp_path / "run"), policy, dtype="float32", train_body=True)


def test_it_learns_beside_a_base_in_few_bits(tiny_base: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = config(
        tmp_path / "run",
        "reward_model",
        model=str(tiny_base),
        finetuning="lora",
        quantization={"bits": 4},
        max_steps=12,
        learning_rate=2e-2,
    )
    result = Trainer(settings).train(ROWS)
    assert result.model.get_base_model().is_quantized
    assert sum(result.losses[-3:]) / 3 < 0.8 * result.losses[0]


def test_a_finished_run_loads_as_a_sequence_classifier(tiny_base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    settings = config(tmp_path / "run", "reward_model", model=str(tiny_base), max_steps=2, save_final=True)
    result = Trainer(settings).train(ROWS)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    assert loaded.config.num_labels == 1
    assert loaded.config.pad_token_id == result.tokenizer.pad_token_id
    assert_same(weights(loaded), weights(result.model))
    torch.testing.assert_close(
        scores(loaded, result.tokenizer, HELD_OUT), scores(result.model, result.tokenizer, HELD_OUT)
    )


def adapted(base: str, seed: int = 0) -> tuple[Any, Any, Any]:
    loaded = load_model(base)
    settings = config(Path("unused"), "reward_model", seed=seed)
    return (
        ALGORITHMS.new("reward_model").adapt(loaded.model, loaded.tokenizer, settings),
        loaded.model,
        loaded.tokenizer,
    )


@pytest.mark.parametrize("base", ["gym-nano", pytest.param("stories260K", marks=pytest.mark.shared)])
def test_the_body_is_the_language_models_own_and_the_head_is_drawn_by_the_seed(
    base: str, request: pytest.FixtureRequest
) -> None:
    if base != "gym-nano":
        base = str(request.getfixturevalue("shared_folder") / "models" / base)
    model, language, tokenizer = adapted(base)
    before = dict(language.config.to_dict())
    assert model.model is language.model
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    assert model.config.num_labels == 1
    assert language.config.to_dict() == before
    assert model.score.weight.shape == (1, model.config.hidden_size)
    assert not any(value.is_meta for value in model.state_dict().values())
    again, other = adapted(base)[0], adapted(base, seed=1)[0]
    assert torch.equal(model.score.weight, again.score.weight)
    assert not torch.equal(model.score.weight, other.score.weight)
    assert 0 < model.score.weight.std() < 0.1


@pytest.mark.shared
def test_a_llama_learns_from_plain_texts(shared_folder: Path, tmp_path: Path) -> None:
    rows, held_out = capitals(48, 0, chat=False), capitals(16, 1, chat=False)
    settings = config(
        tmp_path / "run",
        "reward_model",
        model=str(shared_folder / "models/stories260K"),
        max_steps=16,
        learning_rate=2e-3,
    )
    result = Trainer(settings).train(rows)
    trained = scores(result.model, result.tokenizer, held_out)
    assert (trained[:, 0] > trained[:, 1]).float().mean() > 0.9
