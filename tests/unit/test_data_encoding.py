"""Encoding: only what the assistant says is learnt, cut rows stay sound, and packing loses no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.data import encode_rows
from gym_fed.data.encoding import IGNORED
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import load_tokenizer

CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("gym-nano")


def learnt(tokenizer: Any, row: dict[str, list[int]]) -> str:
    return str(tokenizer.decode([label for label in row["labels"] if label != IGNORED]))


def test_only_the_assistants_words_and_end_tokens_are_labelled(tokenizer: Any) -> None:
    (row,) = encode_rows(tokenizer, [CHAT], max_length=100)
    assert learnt(tokenizer, row) == "a1<|im_end|>a2<|im_end|>"
    assert [label for label in row["labels"] if label != IGNORED] == [
        i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED
    ]


def test_a_template_without_generation_marks_gives_the_same_labels(tokenizer: Any) -> None:
    plain = load_tokenizer("gym-nano")
    plain.chat_template = plain.chat_template.replace("{% generation %}", "").replace(
        "{% endgeneration %}", ""
    )
    marked = encode_rows(tokenizer, [CHAT], max_length=100)[0]
    unmarked = encode_rows(plain, [CHAT], max_length=100)[0]
    assert marked["input_ids"] == unmarked["input_ids"]
    # Without marks, the newline that the template puts behind an answer counts as the assistant's too.
    assert learnt(plain, unmarked) == "a1<|im_end|>\na2<|im_end|>\n"


def test_rows_with_nothing_left_to_learn_are_left_out_and_all_of_them_refused(tokenizer: Any) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 50}, {"role": "assistant", "content": "y"}]}
    assert len(encode_rows(tokenizer, [CHAT, long], max_length=20)) == 1
    with pytest.raises(GymError, match="max_length=20") as caught:
        encode_rows(tokenizer, [long], max_length=20)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_packing_joins_rows_with_end_tokens_and_keeps_every_token(tokenizer: Any) -> None:
    rows = [{"text": f"text number {i}"} for i in range(30)]
    packed = encode_rows(tokenizer, rows, max_length=16, packing=True)
    joined = [i for row in packed for i in row["input_ids"]]
    assert tokenizer.decode(joined) == "".join(f"text number {i}<|im_end|>" for i in range(30))
    assert {len(row["input_ids"]) for row in packed[:-1]} == {16}


def test_conversations_need_a_chat_template(tokenizer: Any) -> None:
    bare = load_tokenizer("gym-nano")
    bare.chat_template = None
    with pytest.raises(GymError, match="no chat template"):
        encode_rows(bare, [CHAT], max_length=100)


@pytest.mark.shared
def test_a_model_with_two_end_tokens_and_no_template_learns_text(shared_folder: Path) -> None:
    stories = load_tokenizer(str(shared_folder / "models" / "stories260K"))
    (row,) = encode_rows(stories, [{"text": "Once upon a time"}], max_length=64)
    assert row["labels"] == row["input_ids"]
    assert len(row["input_ids"]) > 4
