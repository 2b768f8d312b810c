"""A person's rows: their columns decide the kind, and some are held out and never trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates.choice import use_chat_template
from gym_fed.data.rows import place_of
from gym_fed.personalization.rows import MIN_ROWS, read_rows

PAIR = {"prompt": "hello", "chosen": "good day", "rejected": "what"}


def texts(number: int) -> list[dict[str, Any]]:
    return [{"text": f"line {i}"} for i in range(number)]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "supervised"),
        ({"prompt": "a", "completion": "b"}, "supervised"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "supervised",
        ),
        (PAIR, "preference"),
    ],
)
def test_the_columns_decide_the_kind(row: dict[str, Any], kind: str) -> None:
    assert read_rows([row]).kind == kind


def test_the_same_rows_are_held_out_in_any_order_and_never_trained_on() -> None:
    rows = texts(40)
    first = read_rows(rows)
    shuffled = random.Random(0).sample(rows, 40)
    second = read_rows(shuffled)
    held = {row["text"] for row in first.held_out}
    assert len(held) == 8
    assert held == {row["text"] for row in second.held_out}
    assert held.isdisjoint(row["text"] for row in first.train)
    assert len(first.train) == 32


def test_a_row_that_is_there_twice_stands_on_one_side() -> None:
    found = read_rows([*texts(20), *texts(20)])
    held = {row["text"] for row in found.held_out}
    assert len(found.held_out) == len(held) == 4
    assert held.isdisjoint(row["text"] for row in found.train)
    assert len(found.train) == 32, "what is repeated is repeated in training"


def test_with_too_few_rows_none_is_held_out_and_that_is_said() -> None:
    found = read_rows(texts(MIN_ROWS - 1))
    assert found.held_out == []
    assert found.judged_on == f"the {MIN_ROWS - 1} rows used for training"
    assert read_rows(texts(MIN_ROWS)).judged_on == "2 held-out rows"
    assert read_rows(texts(30), held_out=0.0).held_out == []


CHATS = load_tokenizer("gym-nano")
CHATS_NOT = use_chat_template(CHATS, "none")


def test_prompts_and_answers_are_turns_of_a_chat_where_the_base_chats(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "hello"}]
    said = {"role": "assistant", "content": "good day"}
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hello", "completion": "good day"}) + "\n")
    (row,) = read_rows(tmp_path / "a.jsonl").formed(CHATS).train
    assert row == {"messages": [*asked, said]}
    assert place_of(row, 9).endswith("a.jsonl:1")
    (pair,) = read_rows([PAIR]).formed(CHATS).train
    assert pair == {
        "prompt": asked,
        "chosen": [said],
        "rejected": [{"role": "assistant", "content": "what"}],
    }
    many = read_rows([{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(20)])
    turned = many.formed(CHATS)
    held = [row["messages"][0]["content"] for row in turned.held_out]
    assert held == [row["prompt"] for row in many.held_out], "the same rows are held out in either form"
    assert (turned.form, many.form) == ("chat", "plain")
    assert turned.digest != many.digest


def test_bare_text_stays_where_it_is_asked_for_or_the_base_does_not_chat() -> None:
    for rows in ([PAIR], [{"prompt": "a", "completion": "b"}]):
        for tokenizer, as_chat, why in (
            (CHATS, False, "as given"),
            (CHATS_NOT, None, "no chat template"),
            (CHATS_NOT, False, "no chat template"),
        ):
            found = read_rows(rows).formed(tokenizer, as_chat)
            assert found.train == rows
            assert why in found.learnt_as
    with pytest.raises(GymError, match="the base has no chat template") as caught:
        read_rows([PAIR]).formed(CHATS_NOT, True)
    assert caught.value.code is ErrorCode.USAGE


def test_texts_and_conversations_stay_as_they_are() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for row, words in (({"text": "a"}, "texts"), (chat, "conversations")):
        found = read_rows([row]).formed(CHATS)
        assert (found.train, found.learnt_as, found.digest) == ([row], words, read_rows([row]).digest)


def test_what_other_rows_are_and_where_they_stand_is_in_the_refusal(tmp_path: Path) -> None:
    label = {"prompt": "a", "completion": "b", "label": True}
    for rows, words in (
        ([PAIR, {"text": "a"}], "row 2: "),
        ([label], "row 1 is an answer with a label"),
        ([{"prompt": "a"}], "row 1 is a prompt without an answer"),
        ([{"colour": "red"}], "row 1: no known format"),
    ):
        with pytest.raises(GymError, match=words) as caught:
            read_rows(rows)
        assert caught.value.code is ErrorCode.DATA_INVALID
    with pytest.raises(GymError, match="no rows"):
        read_rows([])
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(PAIR) + "\n")
    with pytest.raises(GymError, match=r"b\.jsonl:1 is a preference, but an example precedes it"):
        read_rows(tmp_path)


def test_rows_of_a_kind_that_was_not_asked_for_are_refused() -> None:
    with pytest.raises(GymError, match="row 1 is an example, but a preference is required"):
        read_rows(texts(3), kind="preference")
    with pytest.raises(GymError, match=r"held_out 0\.9"):
        read_rows(texts(3), held_out=0.9)
