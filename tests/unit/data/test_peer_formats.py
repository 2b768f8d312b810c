"""Layouts of Axolotl, ms-swift, OpenAI, Anthropic and TRL: what a row becomes, and which of its keys are not read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.data_source import DataConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.encoding import IGNORED, encode_one
from gym_fed.data.formats._masks import given_weight
from gym_fed.data.formats.base import BadRow
from gym_fed.data.reading import Learned, converted, parse_columns, renaming
from gym_fed.data.rows import as_kind
from gym_fed.data.sources import source_rows
from gym_fed.data.writing import convert_row

Row = dict[str, Any]
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def read(row: Row, learned: Learned = Learned(), columns: dict[str, str] | None = None) -> Any:
    ((_, found),) = converted([("rows:1", row)], "auto", renaming(columns or {}), learned=learned)
    return found


def refusal(row: Row, learned: Learned = Learned()) -> str:
    with pytest.raises(GymError) as caught:
        read(row, learned)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert caught.value.hint
    return caught.value.message


def call(city: str, **identity: str) -> Row:
    return {"type": "function", **identity, "function": {"name": "weather", "arguments": {"city": city}}}


def learned_text(row: Row, **how: Any) -> str:
    tokenizer = load_tokenizer("gym-nano")
    labels = encode_one(tokenizer, row, **how)["labels"]
    return str(tokenizer.decode([label for label in labels if label != IGNORED]))


# What is learned of a turn


def test_parts_with_train_false_are_masked_and_not_learned() -> None:
    parts = [
        {"type": "text", "text": "wrong.", "train": False},
        {"type": "text", "text": " right.", "train": True},
    ]
    found = read({"messages": [ASK, {"role": "assistant", "content": parts}]})
    assert found["messages"][1] == {
        "role": "assistant",
        "content": "wrong. right.",
        "masked": {"content": [[0, 6]]},
    }
    assert "right." in learned_text(found)
    assert "wrong" not in learned_text(found)
    assert "wrong" not in learned_text(found, assistant_only=False)


def test_ranges_of_axolotl_are_learned_with_inclusive_ends_and_nothing_else_is() -> None:
    detail = [
        {"begin_offset": 0, "end_offset": 1, "train": False},
        {"begin_offset": 2, "end_offset": 3, "train": True},
    ]
    found = read(
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "abcdef", "train_detail": detail},
            ]
        }
    )
    assert found["messages"][1]["masked"] == {"content": [[0, 2], [4, 6]]}
    assert learned_text(found).startswith("cd")


def test_masked_parts_survive_writing_and_reading_again() -> None:
    parts = [{"type": "text", "text": "a", "weight": 0}, {"type": "text", "text": "b"}]
    found = dict(read({"messages": [ASK, {"role": "assistant", "content": parts}]}))
    for format in ("messages", "sharegpt"):
        (written,) = convert_row(found, format)
        assert read(json.loads(json.dumps(written))) == found


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"content": [{"type": "text", "text": "a", "train": 0}]}, "'train' of a part of 'content' is 0"),
        (
            {"content": [{"type": "text", "text": "a", "weight": 0.5}]},
            "'weight' of a part of 'content' is 0.5",
        ),
        (
            {"content": "a", "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]},
            "1 character",
        ),
        ({"content": "a", "train_detail": [{"begin_offset": 0, "train": True}]}, "not a list of ranges"),
        ({"content": "a", "masked": {"content": [[0, 2]]}}, "'masked' has a range outside its text"),
        ({"content": "a", "loss_scale": 2.0}, "'loss_scale' of the assistant's turn is 2.0"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(turn: Row, said: str) -> None:
    assert said in refusal({"messages": [ASK, {"role": "assistant", **turn}]})


@pytest.mark.parametrize(("flag", "value"), [("loss", "false"), ("train", "True"), ("weight", "0")])
def test_a_flag_in_quotation_marks_is_refused_with_the_remedy(flag: str, value: str) -> None:
    with pytest.raises(BadRow) as refused:
        given_weight({"role": "assistant", "content": "a", flag: value}, "assistant")
    assert refused.value.remedy == f"write {value.lower()} without quotation marks"


def test_a_judged_answer_with_a_masked_part_is_refused() -> None:
    parts = [{"type": "text", "text": "a", "train": False}, {"type": "text", "text": "b"}]
    row = {"prompt": [ASK], "chosen": [{"role": "assistant", "content": parts}], "rejected": [SAY]}
    assert "weight 0" in refusal(row)


@pytest.mark.parametrize(
    ("roles", "ends", "expected"),
    [
        (["assistant"], "turn", "ho<|im_end|>"),
        (["user"], "turn", "hi<|im_end|>"),
        (["user", "assistant"], "none", "hiho"),
        (["user"], "all", "hi<|im_end|><|im_end|>"),
        ([], "last", ""),
    ],
)
def test_roles_and_end_tokens_of_a_source_decide_what_is_learned(
    roles: list[str], ends: str, expected: str, tmp_path: Any
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [ASK, SAY]}))
    source = DataConfig(path=str(file), roles_to_train=roles, train_on_eos=ends)
    ((_, found),) = source_rows(source)
    tokenizer = load_tokenizer("gym-nano")
    end = tokenizer.eos_token
    assert learned_text(found) == expected.replace("<|im_end|>", end)


def test_a_turns_own_weight_comes_before_the_roles_of_its_source() -> None:
    row = {"messages": [{**ASK, "train": False}, {**SAY, "train": True}, ASK, SAY]}
    found = read(row, Learned(roles=["user"]))
    assert [message.get("weight") for message in found["messages"]] == [0, None, 1, 0]


def test_roles_are_refused_for_rows_that_are_no_conversations() -> None:
    assert "roles_to_train applies to turns" in refusal({"text": "a"}, Learned(roles=["user"]))
    assert "train_on_eos applies to turns" in refusal({"prompt": "a", "completion": "b"}, Learned(ends="all"))


def test_columns_name_the_keys_of_messages() -> None:
    columns = parse_columns("messages=talk,messages.role=who,messages.content=said")
    row = {"talk": [{"who": "human", "said": "hi"}, {"who": "bot", "said": "ho", "train": False}], "id": 1}
    found = read(row, columns=columns)
    assert found == {"messages": [ASK, {**SAY, "weight": 0}]}
    assert found.unread == ("id",)
    with pytest.raises(GymError, match="a turn has no 'who'"):
        read({"talk": [{"role": "user"}]}, columns=columns)


def test_the_answers_in_a_prompt_are_not_learned_with_its_completion() -> None:
    found = read({"prompt": [ASK, SAY, ASK], "completion": [SAY]})
    assert [message.get("weight") for message in found["messages"]] == [None, 0, None, None]
    (written,) = convert_row(dict(found), "completion")
    assert read(written) == found
    pair = read({"prompt": [ASK, SAY, ASK], "chosen": [SAY], "rejected": "no"})
    assert as_kind([pair], "supervised")[0]["messages"][1]["weight"] == 0


# Segments, tokens, steps


def test_segments_are_encoded_one_by_one_and_learned_by_their_label() -> None:
    found = read({"segments": [{"text": "ab", "label": False}, {"text": "cd", "label": True, "x": 1}]})
    assert found.unread == ("a segment's x",)
    assert learned_text(found) == "cd"
    assert learned_text(found, assistant_only=False) == "abcd"
    assert "lacks its text or its label" in refusal({"segments": [{"text": "ab", "label": 1}]})
    assert "has 'system', which rows with 'segments' do not support" in refusal(
        {"segments": [{"text": "a", "label": True}], "system": "s"}
    )


def test_rows_of_tokens_are_read_with_every_kind_of_mask() -> None:
    expected = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7]}
    ids = {"input_ids": [5, 6, 7]}
    assert read({**ids, "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]}) == expected
    assert read({**ids, "completion_mask": [0, 1, 1]}) == expected
    assert read({**ids, "assistant_masks": [0, 1, 1]}) == expected
    assert read(ids)["labels"] == [5, 6, 7]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [5, 6], "labels": [5]}, "'labels' has 1 number for 2 tokens"),
        ({"input_ids": [5, 6], "labels": [5, 7]}, "'labels' has different tokens"),
        ({"input_ids": [5, -6]}, "'input_ids' has -6"),
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "'attention_mask' hides tokens"),
        ({"input_ids": ["a"]}, "not a list of integers"),
    ],
)
def test_rows_of_tokens_that_do_not_fit_are_refused(row: Row, said: str) -> None:
    assert said in refusal(row)


def test_a_solution_in_steps_is_a_judged_answer_and_learned_only_if_every_step_is_right() -> None:
    row = {"prompt": "q", "completions": ["one.", "two."], "labels": [True, False]}
    found = read(row)
    assert as_kind([found], "unpaired") == [{"prompt": "q", "completion": "one.\ntwo.", "label": False}]
    with pytest.raises(GymError, match="rows:1 has a wrong step"):
        as_kind([found], "supervised")
    right = read({**row, "labels": [1, 1]})
    assert as_kind([right], "supervised") == [{"prompt": "q", "completion": "one.\ntwo."}]
    assert as_kind([right], "prompt") == [{"prompt": "q"}]
    assert "does not have true or false for each step" in refusal({**row, "labels": [True]})


# ms-swift


def test_queries_with_history_are_conversations() -> None:
    row = {"system": "s", "query": "hi", "response": "ho", "history": [["a", "b"]]}
    roles = [message["role"] for message in read(row)["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert read({"query": "hi", "response": "ho", "history": '[["a", "b"]]'})["messages"][-2:] == [ASK, SAY]
    assert read({"query": "hi", "response": "ho", "label": False})["label"] is False


def test_pairs_in_a_conversation_are_turns() -> None:
    assert read({"conversation": [{"human": "hi", "assistant": "ho"}]}) == {"messages": [ASK, SAY]}


@pytest.mark.parametrize(
    "rejected",
    [
        {"rejected_response": "no"},
        {"rejected_response": [{"role": "assistant", "content": "no"}]},
        {"rejected_messages": [ASK, {"role": "assistant", "content": "no"}]},
    ],
)
def test_a_rejected_response_makes_a_conversation_a_preference(rejected: Row) -> None:
    expected = {"prompt": [ASK], "chosen": [SAY], "rejected": [{"role": "assistant", "content": "no"}]}
    assert read({"messages": [ASK, SAY], **rejected}) == expected
    if "rejected_messages" not in rejected:
        assert read({"query": "hi", "response": "ho", **rejected}) == expected


def test_a_rejected_answer_to_another_prompt_or_with_other_images_is_refused() -> None:
    other = [{"role": "user", "content": "other"}, SAY]
    assert "have a different prompt" in refusal({"messages": [ASK, SAY], "rejected_messages": other})
    row = {"messages": [ASK, SAY], "rejected_response": "no", "rejected_images": ["a.png"]}
    assert "'rejected_images' differ" in refusal(row)


def test_tool_calls_that_are_turns_of_their_own_are_one_turn() -> None:
    calls = [
        {"role": "tool_call", "content": json.dumps({"name": "weather", "arguments": {"city": city}})}
        for city in ("Oslo", "Rome")
    ]
    row = {
        "messages": [ASK, *calls, {"role": "tool_response", "content": "22"}, SAY],
        "tools": json.dumps([TOOL]),
    }
    messages = read(row)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [call("Oslo"), call("Rome")]
    row["messages"][2]["loss"] = False
    assert "different weights" in refusal(row)


def test_messages_without_an_answer_are_a_prompt_with_its_columns() -> None:
    assert read({"messages": [ASK], "solution": "4"}) == {"prompt": [ASK], "solution": "4"}
    with pytest.raises(GymError, match="rows:1 is a prompt row, but supervised rows are needed"):
        as_kind([read({"messages": [ASK]})], "supervised")
    assert as_kind([read({"messages": [ASK, SAY, ASK]})], "prompt") == [{"prompt": [ASK, SAY, ASK]}]


# OpenAI and Anthropic


def test_parallel_tool_calls_are_compared_with_the_calls() -> None:
    said = {"role": "assistant", "tool_calls": [call("Oslo", id="1"), call("Rome", id="2")]}
    row = {"messages": [ASK, said], "tools": [TOOL], "parallel_tool_calls": True}
    assert read(row).unread == ()
    assert "a turn with several calls" in refusal({**row, "parallel_tool_calls": False})
    assert "expected true or false" in refusal({**row, "parallel_tool_calls": "no"})


def test_keys_of_openais_preference_input_are_read_or_counted() -> None:
    given = {"messages": [ASK], "tools": [TOOL], "parallel_tool_calls": True, "metadata": {}}
    row = {"input": given, "preferred_output": [SAY], "non_preferred_output": "no", "id": 1}
    found = read(row)
    assert found["tools"] == [TOOL]
    assert found.unread == ("id", "input's metadata")


def test_functions_are_tools_and_parameters_may_be_text() -> None:
    row = {"messages": [ASK, SAY], "functions": [{"name": "weather", "parameters": json.dumps(PARAMETERS)}]}
    assert read(row)["tools"] == [TOOL]


def test_keys_of_parts_and_tools_that_are_not_read_are_counted() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}}
    text = {"type": "text", "text": "what?", "cache_control": {}}
    row = {"messages": [{"role": "user", "content": [text, image]}, SAY], "tools": [{**TOOL, "strict": True}]}
    assert read(row).unread == ("a part's cache_control", "a part's detail", "a tool's strict")


def test_blocks_of_anthropic_are_calls_results_and_reasoning() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "22"}]}
    found = read(
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
                SAY,
            ]
        }
    )
    assert found["messages"][1:4] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call("Oslo", id="t1")],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "22", "tool_call_id": "t1"},
        {"role": "user", "content": "and?"},
    ]
    assert found.unread == ("a part's signature",)


def test_an_image_in_anthropics_layout_is_kept() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    found = read({"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}, SAY]})
    assert found["images"] == ["data:image/png;base64,aGk="]


@pytest.mark.parametrize(
    "row",
    [
        {"system": "s", "question": "q", "chosen": "c", "rejected": "r"},
        {"system": "s", "input": "q", "chosen": "c", "rejected": "r"},
        {"system_prompt": "s", "instruction": "q", "chosen_response": "c", "rejected_response": "r"},
    ],
)
def test_preferences_with_their_prompt_under_other_names_are_read(row: Row) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in "cr")
    found = read(row)
    assert found == {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    assert found.unread == ()


def test_end_tokens_and_parts_are_selected_under_a_template_of_unknown_origin() -> None:
    tokenizer = load_tokenizer("gym-nano")
    end = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    parts = [{"type": "text", "text": "no", "train": False}, {"type": "text", "text": "yes"}]
    found = read(
        {"messages": [ASK, {"role": "assistant", "content": parts}]}, Learned(["user", "assistant"], "last")
    )
    labels = [label for label in encode_one(tokenizer, found)["labels"] if label != IGNORED]
    assert tokenizer.decode(labels) == f"hiyes{end}"
