"""Rows of other trainers: pairs, context columns, weights and masks that the layouts give in their own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.reading import Learned, converted

Row = dict[str, Any]
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def read(row: Row, learned: Learned = Learned(), format: str = "auto") -> Any:
    ((_, found),) = converted([("rows:1", row)], format, learned=learned)
    return found


def refusal(row: Row, learned: Learned = Learned()) -> str:
    with pytest.raises(GymError) as caught:
        read(row, learned)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert caught.value.hint
    return caught.value.message


def call(city: str) -> Row:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def test_a_pair_without_a_rejected_answer_is_refused_with_its_place() -> None:
    messages = [ASK, SAY]
    rows = [
        {"messages": messages, "rejected_response": "b"},
        {"messages": messages, "rejected_response": None},
    ]
    with pytest.raises(GymError, match=r"rows:2: has no rejected answer"):
        list(converted([("rows:1", rows[0]), ("rows:2", rows[1])], "auto"))
    with pytest.raises(GymError, match=r"rows:1: has no rejected answer"):
        list(converted([("rows:1", {"messages": messages})], "preference"))


@pytest.mark.parametrize("keys", [("messages", "rejected_messages"), ("chosen", "rejected")])
def test_the_images_of_a_prompt_that_both_answers_repeat_are_read_once(
    keys: tuple[str, str], tmp_path: Path
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"x")

    def talk(image: str, answer: str) -> list[Row]:
        parts = [{"type": "image", "image": str(tmp_path / image)}, {"type": "text", "text": "q"}]
        return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]

    found = read({keys[0]: talk("a.png", "yes"), keys[1]: talk("a.png", "no")})
    assert found["images"] == [str(tmp_path / "a.png")]
    assert found["rejected"] == [{"role": "assistant", "content": "no"}]
    assert "begin" in refusal({keys[0]: talk("a.png", "yes"), keys[1]: talk("b.png", "no")})


def test_parallel_tool_calls_are_compared_with_the_calls_of_answers() -> None:
    twice = {"role": "assistant", "content": "", "tool_calls": [call("A"), call("B")]}
    pair = {"prompt": [ASK], "chosen": [twice], "rejected": [SAY], "parallel_tool_calls": False}
    assert "a turn with several calls" in refusal(pair)


# Columns of other formats, and context that a format has no place for


@pytest.mark.parametrize(
    "more",
    [
        {"segments": [{"start": 0, "end": 1, "text": "hello"}]},
        {"input_ids": [1, 2], "attention_mask": [1, 1]},
    ],
)
def test_texts_with_segments_of_a_transcript_or_ids_of_a_tokenizer_are_texts(more: Row) -> None:
    found = read({"text": "hello", **more})
    assert found == {"text": "hello"}
    assert found.unread == tuple(sorted(more))


def test_ids_next_to_a_text_are_tokens_if_they_have_labels_or_are_chosen() -> None:
    row = {"text": "hello", "input_ids": [1, 2]}
    assert read({**row, "labels": [-100, 2]}) == {"input_ids": [1, 2], "labels": [-100, 2]}
    assert read(row, format="tokenized") == {"input_ids": [1, 2], "labels": [1, 2]}


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [1, 2]},
        {"segments": [{"label": True, "text": "a"}]},
        {"prompt": "p", "completions": ["a"], "labels": [True]},
    ],
)
@pytest.mark.parametrize("more", [{"system": "S"}, {"tools": [{"name": "f"}]}, {"images": ["a.png"]}])
def test_context_that_a_format_would_drop_is_refused(row: Row, more: Row) -> None:
    assert f"has {next(iter(more))!r} next to {next(iter(row))!r}" in refusal({**row, **more})
