"""Evaluation: losses and answers that equal what is computed by hand, whatever the batch size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.data import generate
from gym_fed.errors import ErrorCode, GymError
from gym_fed.evaluation import ChatSession, answer, exact_match, heldout_loss
from gym_fed.models import LoadedModel, load_model

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


def test_a_chat_streams_what_it_answers_and_remembers_until_reset(nano: LoadedModel) -> None:
    session = ChatSession(nano.model, nano.tokenizer, max_new_tokens=20)
    pieces: list[str] = []
    said = session.say("copy: hello", on_text=pieces.append)
    assert "".join(pieces) == said == "hello"
    assert len(pieces) > 2
    assert [m["role"] for m in session.history] == ["user", "assistant"]
    session.reset()
    assert session.history == []


def test_a_chat_forgets_its_oldest_turns_when_the_context_is_full(nano: LoadedModel) -> None:
    session = ChatSession(nano.model, nano.tokenizer, max_new_tokens=20)
    for index in range(12):
        session.say(f"copy: {index} is a number")
    assert 2 <= len(session.history) < 24
    with pytest.raises(GymError, match="has room for") as caught:
        session.say("x" * 300)
    assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.shared
def test_a_chat_with_a_model_without_template_continues_the_text(shared_folder: Path) -> None:
    loaded = load_model(str(shared_folder / "models/stories260K"))
    session = ChatSession(loaded.model, loaded.tokenizer, max_new_tokens=20)
    assert len(session.say("Once upon a time").split()) > 3
    assert session.history == []
