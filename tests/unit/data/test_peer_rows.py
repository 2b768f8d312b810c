"""Rows of other trainers: pairs, context columns, weights and masks that the layouts give in their own ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.reading import Learned, converted, renaming
from gym_fed.data.rows import as_kind

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
    problem = "different prompt" if keys[0] == "messages" else "no common beginning"
    assert problem in refusal({keys[0]: talk("a.png", "yes"), keys[1]: talk("b.png", "no")})


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
    assert f"has {next(iter(more))!r}, which rows with {next(iter(row))!r} do not support" in refusal(
        {**row, **more}
    )


# Weights and masks


def parts(**flag: bool) -> list[Row]:
    return [{"type": "text", "text": "ab", **flag}, {"type": "text", "text": "cd"}]


def test_a_flag_of_a_part_makes_its_turn_learned_whatever_its_role_as_in_axolotl() -> None:
    def first(learned: Learned = Learned(), **turn: Any) -> Row:
        return dict(read({"messages": [{"role": "user", **turn}, SAY]}, learned)["messages"][0])

    user = {"role": "user", "content": "abcd", "weight": 1}
    assert first(content=parts(train=True)) == user
    assert first(content=parts(train=False)) == {**user, "masked": {"content": [[0, 2]]}}
    whole = [{"begin_offset": 0, "end_offset": 3, "train": True}]
    assert first(content="abcd", train_detail=whole) == user
    assert first(content=parts(train=True), train=False) == {**user, "weight": 0}
    answer = first(Learned([]), role="assistant", content=parts(train=True))
    assert answer == {"role": "assistant", "content": "abcd"}


def test_a_column_masked_of_another_tool_is_not_read() -> None:
    found = read({"messages": [ASK, {**SAY, "masked": True}]})
    assert found == {"messages": [ASK, SAY]}
    assert found.unread == ("a message's masked",)


def test_the_flag_of_a_tool_call_turn_is_not_lost_when_it_joins_its_turn() -> None:
    made = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
    silent = {**SAY, "weight": 0}
    for turns, learned in (
        [[SAY, {**made, "train": True}], Learned([])],
        [[silent, {**made, "train": True}], Learned()],
    ):
        assert "have different weights" in refusal({"messages": [ASK, *turns]}, learned)
    joined = read({"messages": [ASK, silent, made]})["messages"][1]
    assert joined["weight"] == 0
    assert joined["tool_calls"][0]["function"]["name"] == "f"
    details = [{"begin_offset": 0, "end_offset": 1, "train": True}]
    assert "parts of a tool call" in refusal({"messages": [ASK, {**made, "train_detail": details}]})


def test_a_conversation_of_learned_users_is_no_prompt() -> None:
    learned = {**ASK, "weight": 1}
    assert read({"messages": [ASK]}, Learned(["user"])) == {"messages": [learned]}
    assert read({"messages": [{**ASK, "train": True}]}) == {"messages": [learned]}
    assert "prompt" in read({"messages": [ASK]})


def test_roles_to_train_are_refused_for_pairs_before_their_weights_are_read() -> None:
    pair = {"prompt": [ASK], "chosen": [SAY], "rejected": [{**SAY, "content": "z"}]}
    assert "is not a conversation, but roles_to_train applies to turns" in refusal(pair, Learned([]))


def test_flags_of_a_turn_in_anthropics_layout_are_those_of_its_results() -> None:
    use = [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]
    result = [{"type": "tool_result", "tool_use_id": "1", "content": "res"}]
    turns = [{"role": "assistant", "content": use}, {"role": "user", "train": True, "content": result}]
    found = read({"messages": [ASK, *turns, SAY]})["messages"][2]
    assert found == {"role": "tool", "content": "res", "tool_call_id": "1", "weight": 1}
    thinking = [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "a"}]
    twice = {"role": "assistant", "content": thinking, "reasoning_content": "R"}
    assert "'reasoning_content' of one turn differ" in refusal({"messages": [ASK, twice]})


@pytest.mark.parametrize(
    ("source", "key"), [({"type": "url"}, "'url'"), ({"type": "base64", "media_type": "image/png"}, "'data'")]
)
def test_an_image_in_anthropics_layout_without_a_place_is_refused(source: Row, key: str) -> None:
    content = [{"type": "image", "source": source}, {"type": "text", "text": "q"}]
    assert f"the source of an image has no {key}" in refusal(
        {"messages": [{"role": "user", "content": content}, SAY]}
    )


def test_a_prompt_from_a_conversation_has_nothing_about_what_is_learned() -> None:
    row = read(
        {"messages": [{**ASK, "train": True}, {**SAY, "train": False}, ASK], "id": 1}, Learned(None, "all")
    )
    assert as_kind([row], "prompt") == [{"prompt": [ASK, SAY, ASK]}]


@pytest.mark.parametrize("source", [{"roles_to_train": ["user"]}, {"train_on_eos": "all"}])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"assistant_only_loss": False}, "trains on whole conversations"),
        ({"train_on_prompt": True}, "trains on whole conversations"),
        ({"packing": True}, "trains on whole conversations"),
        ({"algorithm": "pretrain"}, "trains on whole conversations"),
        ({"mask_history": True}, "and mask_history"),
    ],
)
def test_settings_about_turns_are_refused_where_the_run_ignores_them(
    source: Row, settings: Row, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        TrainingConfig(data=[{"path": "rows.jsonl", **source}], **settings)
    assert next(iter(source)) in str(caught.value)
    TrainingConfig(data=[{"path": "rows.jsonl", **source}])


def test_columns_name_turns_as_text_and_at_any_depth() -> None:
    turns = [{"speaker": "user", "said": "hi"}, {"speaker": "assistant", "said": "ho"}]
    within = {"messages.role": "speaker", "messages.content": "said"}
    for row, column in (
        ({"talk": json.dumps(turns)}, "talk"),
        ({"data": {"inner": {"talk": turns}, "id": 1}}, "data.inner.talk"),
    ):
        rename = renaming({"messages": column, **within})
        ((_, found),) = converted([("rows:1", row)], "auto", rename)
        assert found == {"messages": [ASK, SAY]}
