"""How a step's rows are cut into batches changes nothing: every algorithm ends with the same weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS
from gym_fed.evaluation.graders.base import Grader, Sample
from gym_fed.training.trainer import Trainer
from tests.support.quick import first_of_each, quick

LENGTHS = (1, 9, 2, 14, 5, 3, 11, 1, 7, 4)
"""Ten answers of unequal lengths: steps of six rows leave four for the last step of an epoch, in batches of 3 and 1."""
STEPS = 2
TOLERANCE = 1e-5
CUTS = ((6, 1), (3, 2))
"""Rows of a batch, and batches of a step."""


def prompt(index: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "double: " + "ab" * (1 + index % 4)}]


def answer(length: int, letter: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": letter * length}]


CHATS = [{"messages": prompt(i) + answer(n, "c")} for i, n in enumerate(LENGTHS)]
TEXTS = [{"text": "once " + "ab " * n} for n in LENGTHS]
PAIRS = [
    {"prompt": prompt(i), "chosen": answer(n, "c"), "rejected": answer(LENGTHS[-1 - i], "d")}
    for i, n in enumerate(LENGTHS)
]
LIKED = [
    {"prompt": prompt(i), "completion": answer(n, "cd"[i % 2]), "label": i % 3 > 0}
    for i, n in enumerate(LENGTHS)
]
FORGOTTEN = [{**row, "forget": True} for row in CHATS] + [
    {"messages": prompt(i) + answer(1 + i * 3 % 11, "e")} for i in range(len(LENGTHS))
]
PROMPTS = [{"prompt": prompt(i)} for i in range(len(LENGTHS))]

ROWS: dict[str, list[dict[str, Any]]] = {
    "pretrain": TEXTS,
    "kto": LIKED,
    "gradient_difference": FORGOTTEN,
    "npo": FORGOTTEN,
    **dict.fromkeys(("sft", "distillation", "sequence_distillation"), CHATS),
    **dict.fromkeys(("dpo", "orpo", "simpo", "tdpo", "reward_model"), PAIRS),
    **dict.fromkeys(("ppo", "grpo", "gspo", "rloo"), PROMPTS),
}
ROLLOUTS = {"max_completion_length": 12, "num_generations": 3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}),
    ("pretrain", {"packing": False}),
    ("dpo", {}),
    ("dpo", {"dpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}}),
    ("dpo", {"finetuning": "lora"}),
    ("kto", {}),
    ("kto", {"finetuning": "lora"}),
    ("kto", {"kto": {"precompute_ref_log_probs": False}}),
    ("kto", {"kto": {"loss_type": "apo_zero_unpaired"}}),
    ("orpo", {}),
    ("simpo", {"simpo": {"cpo_alpha": 0.5}}),
    ("tdpo", {}),
    ("reward_model", {"reward_model": {"center_rewards_coefficient": 0.1}}),
    ("gradient_difference", {"gradient_difference": {"forget_loss_cap": 30.0}}),
    ("npo", {}),
    ("distillation", {"distillation": {}}),
    ("distillation", {"distillation": {"lmbda": 1.0}}),
    ("sequence_distillation", {"sequence_distillation": {}}),
    ("ppo", {"ppo": {**ROLLOUTS, "num_generations": 1, "num_iterations": 1}}),
    ("grpo", {"grpo": {**ROLLOUTS, "entropy_coef": 0.1}}),
    ("grpo", {"grpo": {**ROLLOUTS, "loss_type": "grpo"}}),
    ("grpo", {"grpo": {**ROLLOUTS, "loss_type": "dr_grpo"}}),
    ("gspo", {"gspo": ROLLOUTS}),
    ("rloo", {"rloo": ROLLOUTS}),
]


class Fifths(Grader):
    """A reward that follows from the answer."""

    name = "fifths"

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(len(sample.completion) % 5) for sample in samples]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gym-nano with other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    nano = load_model("gym-nano")
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in nano.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    nano.model.save_pretrained(folder)
    nano.tokenizer.save_pretrained(folder)
    return folder


def trained(folder: Path, algorithm: str, changes: dict[str, Any], size: int, accumulation: int) -> Any:
    rewarded = algorithm in ("ppo", "grpo", "gspo", "rloo")
    config = TrainingConfig(
        **{
            "algorithm": algorithm,
            "output_dir": folder,
            "max_steps": STEPS,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
            "optimizer": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "max_length": 64,
            "device": "cpu",
            "num_threads": 1,
            "save_final": False,
            **changes,
        }
    )
    nano = load_model("gym-nano")
    graders = [Fifths()] if rewarded else []
    return Trainer(config, model=nano.model, tokenizer=nano.tokenizer, graders=graders).train(ROWS[algorithm])


def weights(result: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in result.model.named_parameters() if weight.requires_grad}


def moved(found: dict[str, torch.Tensor]) -> float:
    """The most that a weight is from where it began; an adapter's from 0."""
    start = load_model("gym-nano").model.state_dict()
    return max(float((value - start.get(name, 0 * value)).abs().max()) for name, value in found.items())


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_every_algorithm_has_a_case() -> None:
    assert {name for name, _ in CASES} == set(ALGORITHMS.own())


@pytest.mark.few(6, "one normalisation for every algorithm")
@pytest.mark.parametrize(("algorithm", "changes"), first_of_each(CASES))
def test_batches_of_a_step_may_be_cut_as_one_likes(
    algorithm: str,
    changes: dict[str, Any],
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if algorithm in ("distillation", "sequence_distillation"):
        changes = {algorithm: {**changes[algorithm], "teacher": str(teacher), "max_completion_length": 200}}
        _answer_in_a_fixed_way(monkeypatch)
    whole, cut = (
        weights(trained(tmp_path / f"{size}x{times}", algorithm, changes, size, times))
        for size, times in CUTS
    )
    assert moved(whole) > 20 * TOLERANCE, "a run that moves nothing would equal any other"
    assert far(whole, cut) < TOLERANCE


@pytest.mark.parametrize("precompute", [True, False])
def test_kto_in_batches_of_one_row_estimates_the_kl_of_the_step(precompute: bool, tmp_path: Path) -> None:
    changes = {"kto": {"precompute_ref_log_probs": precompute}, "learning_rate": 0.5}
    whole = trained(tmp_path / "whole", "kto", changes, 6, 1)
    single = trained(tmp_path / "single", "kto", changes, 1, 6)
    kls = [entry["kl"] for entry in whole.history if "kl" in entry]
    assert max(kls) > 0.01, "a KL of 0 would be the same whatever it is estimated on"
    assert [entry["kl"] for entry in single.history if "kl" in entry] == pytest.approx(kls, abs=1e-4)
    assert far(weights(whole), weights(single)) < 10 * TOLERANCE


def test_the_kl_of_a_step_of_kto_is_the_mean_over_its_rows(tmp_path: Path) -> None:
    """Of the answers of neighbours, under the weights after the first step, less the model's at the start."""

    def log_prob(model: Any, row: dict[str, Any], completion: dict[str, Any]) -> torch.Tensor:
        tokenizer = load_model("gym-nano").tokenizer
        asked = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        said = tokenizer.apply_chat_template(row["prompt"] + completion["completion"], tokenize=False)
        start, ids = len(tokenizer(asked)["input_ids"]), torch.tensor([tokenizer(said)["input_ids"]])
        with torch.no_grad():
            logits = model.eval().double()(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[start - 1 :].sum()

    changes = {"learning_rate": 0.5}
    first = trained(tmp_path / "first", "kto", {**changes, "max_steps": 1}, 3, 2).model
    found = [
        entry["kl"] for entry in trained(tmp_path / "run", "kto", changes, 3, 2).history if "kl" in entry
    ]
    order = list(LIKED)
    random.Random(TrainingConfig.model_fields["seed"].default).shuffle(order)
    step = order[6:]
    start = load_model("gym-nano").model
    ratios = [
        log_prob(first, row, step[at - 1]) - log_prob(start, row, step[at - 1]) for at, row in enumerate(step)
    ]
    expected = float(sum(ratios)) / len(step)
    assert expected > 0.01
    assert found[1] == pytest.approx(expected, rel=1e-3)


ALIKE = [
    {
        "messages": prompt(0) + answer(4, "bcdefghijk"[i]),
        "prompt": prompt(0),
        "completion": answer(4, "bcdefghijk"[i]),
        "chosen": answer(4, "bcdefghijk"[i]),
        "rejected": answer(4, "lmnopqrstu"[i]),
        "label": i % 2 == 0,
    }
    for i in range(10)
]
"""Rows of one length, of which every mean of batches is the mean."""


@pytest.mark.parametrize(
    "algorithm",
    quick(
        ["dpo", "kto", "orpo", "simpo", "reward_model", "gradient_difference", "npo", "distillation"],
        *("dpo", "kto", "npo", "distillation"),
    ),
)
def test_an_evaluation_is_no_part_of_a_step_and_its_loss_is_whole(
    algorithm: str, teacher: Path, tmp_path: Path
) -> None:
    """Nothing is learned at this rate, so that the step and the evaluation after it have one loss."""
    keys = {
        **dict.fromkeys(("dpo", "orpo", "simpo", "reward_model"), ("prompt", "chosen", "rejected")),
        "kto": ("prompt", "completion", "label"),
    }.get(algorithm, ("messages",))
    rows = [{key: row[key] for key in keys} for row in ALIKE]
    if algorithm in ("gradient_difference", "npo"):
        rows = [{**row, "forget": True} for row in rows] + [
            {"messages": prompt(0) + answer(4, letter)} for letter in "lmnopqrstu"
        ]
    config = TrainingConfig(
        algorithm=algorithm,
        output_dir=tmp_path / "run",
        max_steps=1,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=2,
        eval_steps=1,
        optimizer="sgd",
        learning_rate=1e-12,
        max_length=64,
        device="cpu",
        num_threads=1,
        save_final=False,
        **({"distillation": {"teacher": str(teacher)}} if algorithm == "distillation" else {}),
    )
    nano = load_model("gym-nano")
    history = Trainer(config, model=nano.model, tokenizer=nano.tokenizer).train(rows, rows).history
    learned = next(entry["loss"] for entry in history if "loss" in entry)
    held_out = next(entry["eval_loss"] for entry in history if "eval_loss" in entry)
    assert abs(learned) > 1e-3
    assert held_out == pytest.approx(learned, rel=1e-3)


def _answer_in_a_fixed_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The student's own answers follow from the prompts alone: draws would differ with the batches."""
    from trl.experimental.gkd import GKDTrainer

    def answers(model: Any, inputs: Any, generation_config: Any) -> tuple[torch.Tensor, ...]:
        ids, mask = inputs["prompts"], inputs["prompt_attention_mask"]
        lengths = 1 + (ids * mask).sum(dim=1) % 9
        own = (torch.arange(9)[None] < lengths[:, None]).long()
        whole = torch.cat([ids, 97 + own * 0 + torch.arange(9)], dim=1)
        attention = torch.cat([mask, own], dim=1)
        labels = torch.where(torch.cat([mask * 0, own], dim=1) == 1, whole, -100)
        return whole, attention, labels

    monkeypatch.setattr(GKDTrainer, "generate_on_policy_outputs", staticmethod(answers))
