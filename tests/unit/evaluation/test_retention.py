"""The retention check: what a tuned model still knows, on the packaged questions and texts."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.data import generate
from gym_fed.evaluation.loss import heldout_loss, row_losses
from gym_fed.evaluation.retention import (
    MIN_LOSS,
    Retention,
    RetentionScores,
    _is_right,
    compare_retention,
    knows_items,
    retention_items,
    retention_scores,
)


@pytest.fixture(scope="module")
def nano() -> Any:
    return load_model("gym-nano")


@pytest.fixture(scope="module")
def items(nano: Any) -> list[dict[str, Any]]:
    return retention_items(nano.tokenizer)


@pytest.fixture(scope="module")
def scores(nano: Any, items: list[dict[str, Any]]) -> RetentionScores:
    """The scores of the unchanged gym-nano."""
    return retention_scores(nano.model, nano.tokenizer, items)


def test_losses_of_rows_average_to_the_loss_of_all_tokens(nano: Any) -> None:
    rows = generate("copy", 7) + generate("reverse", 6)
    losses = row_losses(nano.model, nano.tokenizer, rows, max_length=64, batch_size=4)
    alone = [row_losses(nano.model, nano.tokenizer, [row], max_length=64)[0] for row in rows]

    assert losses == pytest.approx(alone, abs=1e-5)
    by_row = [heldout_loss(nano.model, nano.tokenizer, [row], max_length=64) for row in rows]
    assert losses == pytest.approx(by_row, abs=1e-5)


def test_a_row_without_a_token_to_predict_has_no_loss(nano: Any) -> None:
    losses = row_losses(nano.model, nano.tokenizer, [{"text": "abc"}, *generate("copy", 1)], max_length=1)
    assert all(map(math.isnan, losses))


def test_gym_nano_is_asked_its_own_tasks_and_knows_them(
    nano: Any, items: list[dict[str, Any]], scores: RetentionScores
) -> None:
    assert all("messages" in row for row in items)
    assert knows_items(nano.model, nano.tokenizer, items, scores.losses)
    assert len(scores.right) == 120
    assert sum(scores.right) > 80


def test_a_model_of_random_weights_knows_nothing(nano: Any, items: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(nano.model)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.02)
    losses = row_losses(model, nano.tokenizer, items, max_length=256)

    assert not knows_items(model, nano.tokenizer, items, losses)


def test_a_model_that_was_ruined_is_reported_and_an_unchanged_one_is_not(
    nano: Any, items: list[dict[str, Any]], scores: RetentionScores
) -> None:
    items = items[::4]
    before = RetentionScores(scores.losses[::4], scores.right[::4])
    ruined = copy.deepcopy(nano.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for value in ruined.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    after = retention_scores(ruined, nano.tokenizer, items)

    assert not compare_retention(before, before).is_lost
    lost = compare_retention(before, after)
    assert lost.is_lost
    assert lost.rise > 2 * lost.stderr
    assert lost.num_items == len(items)


@pytest.mark.parametrize(
    ("rise", "stderr", "is_lost"),
    [
        (MIN_LOSS / 2, 0.001, False),
        (0.2, 0.15, False),
        (0.2, 0.05, True),
        (-0.3, 0.01, False),
        (math.nan, 0.01, True),
        (math.inf, 0.0, True),
    ],
)
def test_a_rise_counts_beyond_its_error_and_the_least(rise: float, stderr: float, is_lost: bool) -> None:
    assert Retention(10, 1.0, 1.0 + rise, stderr).is_lost is is_lost


def test_the_packaged_items_are_questions_with_answers_and_texts(nano: Any) -> None:
    class Other:
        chat_template = "x"

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    chats = retention_items(Other())
    Other.chat_template = ""
    plain = retention_items(Other())

    assert len(chats) == len(plain) >= 80
    assert sum("text" in row for row in chats) >= 20
    assert all(row["messages"][-1]["content"] for row in chats if "messages" in row)
    assert all(row["completion"].startswith(" ") for row in plain if "prompt" in row)


def test_right_answers_that_are_lost_count_although_the_loss_falls() -> None:
    before = RetentionScores([1.0, 1.1, 0.9, 1.0] * 10, [True] * 36 + [False] * 4)
    after = RetentionScores([0.8, 0.9, 0.7, 0.8] * 10, [True] * 22 + [False] * 18)
    found = compare_retention(before, after)

    assert found.rise < 0
    assert found.is_lost
    assert "36 -> 22 of 40" in found.describe()
    assert "36 -> 22 right" in str(found.warning(["a", "b"]))


def test_answers_that_change_both_ways_are_not_a_loss() -> None:
    before = RetentionScores([1.0, 1.1] * 20, [True] * 20 + [False] * 20)
    after = RetentionScores([1.0, 1.1] * 20, [False] * 6 + [True] * 19 + [False] * 15)
    found = compare_retention(before, after)

    assert (found.answers_lost, found.right_after) == (6, 19)
    assert not found.is_lost
    assert "(6 lost, 5 won)" in found.describe()


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("The capital of France is Paris.", True),
        ("PARIS!", True),
        ("It is in the region of Parisian style.", False),
        ("L'Étoile", False),
    ],
)
def test_an_answer_is_right_if_it_has_the_key_as_a_word(answer: str, is_right: bool) -> None:
    assert _is_right({"key": ["paris"]}, answer) is is_right
