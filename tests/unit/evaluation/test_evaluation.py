"""Evaluation: losses and answers that equal what is computed by hand, whatever the batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.evaluation import answer, exact_match, heldout_loss
from gym_fed.evaluation.harness.sources import own_rows

ROWS = generate("copy", 20, split="heldout") + generate("words", 20, split="heldout")


@pytest.fixture(scope="module")
def nano() -> LoadedModel:
    return load_model("gym-nano")


@pytest.fixture(scope="module")
def tiny(tiny_base: Path) -> LoadedModel:
    return load_model(str(tiny_base))


def test_the_loss_is_the_mean_over_the_assistants_tokens(tiny: LoadedModel) -> None:
    row = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    ids = tiny.tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    # header a b end newline header c d end newline
    with torch.inference_mode():
        scores = tiny.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = -sum(float(scores[i - 1, ids[i]]) for i in (6, 7, 8)) / 3
    assert heldout_loss(tiny.model, tiny.tokenizer, [row]) == pytest.approx(expected, rel=1e-5)


def test_the_loss_does_not_depend_on_batches_and_leaves_the_mode_alone(tiny: LoadedModel) -> None:
    tiny.model.train()
    losses = [heldout_loss(tiny.model, tiny.tokenizer, ROWS, batch_size=size) for size in (1, 7, 64)]
    assert tiny.model.training
    tiny.model.eval()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert losses[0] == pytest.approx(math.log(tiny.model.config.vocab_size), rel=0.1)


def test_answers_do_not_depend_on_the_batch(nano: LoadedModel) -> None:
    rows = generate("reverse", 12, split="heldout")
    together = exact_match(nano.model, nano.tokenizer, rows)
    alone = [
        answer(nano.model, nano.tokenizer, row["messages"][0]["content"]) == row["messages"][1]["content"]
        for row in rows
    ]
    assert together == pytest.approx(sum(alone) / 12)


def test_exact_match_counts_wrong_answers(nano: LoadedModel) -> None:
    right = generate("length", 10, split="heldout")
    wrong = [{"messages": [row["messages"][0], {"role": "assistant", "content": "no"}]} for row in right]
    assert exact_match(nano.model, nano.tokenizer, wrong) == 0.0
    both = exact_match(nano.model, nano.tokenizer, right + wrong)
    assert both == pytest.approx(exact_match(nano.model, nano.tokenizer, right) / 2)


def test_rows_without_an_answer_are_refused(nano: LoadedModel) -> None:
    bad: list[list[dict[str, Any]]] = [
        [],
        [{"text": "x"}],
        [{"messages": [{"role": "user", "content": "x"}]}],
    ]
    for rows in bad:
        with pytest.raises(GymError) as caught:
            exact_match(nano.model, nano.tokenizer, rows)
        assert caught.value.code is ErrorCode.DATA_INVALID


def test_a_generated_task_is_evaluated_on_rows_that_training_never_generates(tiny: LoadedModel) -> None:
    answers = [row["answer"] for row in own_rows("copy", tiny.tokenizer, 20).rows]
    held_out, trained = (
        [row["messages"][-1]["content"] for row in generate("copy", 20, split=split)]
        for split in ("heldout", "train")
    )
    assert answers == held_out
    assert not set(answers) & set(trained)
