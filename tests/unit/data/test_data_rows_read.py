"""Preference pairs, judgements, prompts, tools and images: each way of writing them gives the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows
from gym_fed.data.rows import as_kind, kind_of

ASK = {"role": "user", "content": "hi"}
GOOD, BAD = {"role": "assistant", "content": "ho"}, {"role": "assistant", "content": "no"}
PAIR = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
HUMAN = {"from": "human", "value": "hi"}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
FUNCTION = {"type": "function", "function": TOOL}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}


def read(tmp_path: Path, row: Any, format: str = "auto") -> dict[str, Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = load_rows(file, format)
    return found


def refusal(tmp_path: Path, row: Any, format: str = "auto") -> GymError:
    with pytest.raises(GymError) as caught:
        read(tmp_path, row, format)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert f"{tmp_path / 'rows.jsonl'}:1: " in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": [ASK], "chosen": "ho", "rejected": "no"},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "hi", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"chosen_messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]},
        {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
        {"instruction": "hi", "input": "", "chosen": "ho", "rejected": "no"},
        {
            "conversations": [HUMAN],
            "chosen": {"from": "gpt", "value": "ho"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    ],
)
def test_every_way_of_writing_a_pair_gives_the_same_row(tmp_path: Path, row: dict[str, Any]) -> None:
    found = read(tmp_path, row)
    assert found == PAIR
    assert kind_of(found) == "preference"


def test_pairs_of_texts_stay_texts_and_an_implicit_prompt_ends_at_a_word(tmp_path: Path) -> None:
    row = {"prompt": "The sky", "chosen": " is blue", "rejected": " is green"}
    assert read(tmp_path, row) == row
    found = read(tmp_path, {"chosen": "The sky is blue", "rejected": "The sky is black"})
    assert found == {"prompt": "The sky is", "chosen": " blue", "rejected": " black"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "'rejected' is int"),
        ({"chosen": [ASK, GOOD], "rejected": [GOOD]}, "have no common beginning"),
        ({"prompt": "xx", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "do not begin with 'prompt'"),
    ],
)
def test_pairs_that_prefer_nothing_are_refused(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    assert problem in refusal(tmp_path, row).message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "completion": [GOOD], "label": True},
        {"prompt": [ASK], "completion": "ho", "label": True},
        {"messages": [ASK, GOOD], "label": True},
        {"messages": [ASK, GOOD], "kto_tag": 1},
        {"conversations": [HUMAN, {"from": "gpt", "value": "ho"}], "label": True},
        {"instruction": "hi", "output": "ho", "kto_tag": "true"},
    ],
)
def test_every_way_of_judging_an_answer_gives_the_same_row(tmp_path: Path, row: dict[str, Any]) -> None:
    found = read(tmp_path, row)
    assert found == {"prompt": [ASK], "completion": [GOOD], "label": True}
    assert kind_of(found) == "unpaired"


def test_a_judgement_that_is_no_truth_value_is_refused(tmp_path: Path) -> None:
    assert (
        "'kto_tag' is 'perhaps'" in refusal(tmp_path, {"messages": [ASK, GOOD], "kto_tag": "perhaps"}).message
    )
    assert "'label' is missing" in refusal(tmp_path, {"messages": [ASK, GOOD]}, "kto").message
    assert "last turn" in refusal(tmp_path, {"messages": [GOOD, ASK], "label": True}).message


def test_prompts_keep_their_other_columns_for_graders(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "answer": "4", "level": 1}
    assert read(tmp_path, row) == row
    assert read(tmp_path, {"prompt": [ASK], "answer": "ho"}) == {"prompt": [ASK], "answer": "ho"}
    system = read(tmp_path, {"prompt": "hi", "system": "Be brief"})
    assert [m["role"] for m in system["prompt"]] == ["system", "user"]


def test_prompt_and_completion_are_learnt_from_as_conversation_or_as_two_texts(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt": [ASK], "completion": [GOOD]}) == {"messages": [ASK, GOOD]}
    row = {"prompt": "a ", "completion": "b"}
    assert read(tmp_path, row) == row
    assert as_kind([row], "supervised") == [row]
    assert as_kind([row], "prompt") == [{"prompt": "a ", "answer": "b"}]


@pytest.mark.parametrize(
    ("row", "kind", "problem"),
    [
        ({"messages": "x"}, "supervised", "row 1: 'messages' is str, expected messages"),
        ({"messages": [{"role": "user"}]}, "supervised", "expected messages"),
        ({"messages": []}, "prompt", "expected messages"),
        ({"text": None}, "supervised", "'text' is NoneType, expected text"),
        ({"prompt": "a", "completion": 1}, "supervised", "'completion' is int, expected text or messages"),
        ({"prompt": ["a"]}, "prompt", "'prompt' is list"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "preference", "'rejected' is NoneType"),
    ],
)
def test_rows_made_in_memory_are_looked_at_too(row: dict[str, Any], kind: Any, problem: str) -> None:
    with pytest.raises(GymError, match=problem) as caught:
        as_kind([row], kind)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_tools_and_calls_read_alike_from_openai_and_sharegpt(tmp_path: Path) -> None:
    result = {"role": "tool", "content": "3"}
    arguments = {"function": {"name": "add", "arguments": '{"a": 1}'}, "type": "function"}
    openai = {
        "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [arguments]}, result, GOOD],
        "tools": [FUNCTION],
    }
    sharegpt = {
        "conversations": [
            HUMAN,
            {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "ho"},
        ],
        "tools": json.dumps([TOOL]),
    }
    expected = {"messages": [ASK, CALL, result, GOOD], "tools": [FUNCTION]}
    assert read(tmp_path, openai) == expected
    assert read(tmp_path, sharegpt) == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tools": "not json"}, "'tools' is not valid JSON"),
        ({"tools": [{"description": "nameless"}]}, "something other than functions"),
        ({"messages": [ASK, {**CALL, "tool_calls": [{"function": {}}]}]}, "tool call has no name"),
        ({"messages": [{**CALL, "role": "user"}, GOOD]}, "'tool_calls' in a turn of the user"),
        ({"audios": ["a.wav"]}, "no audio file at 'a.wav'"),
        ({"video": "https://x/y.mp4"}, "video 'https://x/y.mp4' is a URL"),
        ({"audios": [7]}, "'audios' holds int"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    assert problem in refusal(tmp_path, {"messages": [ASK, GOOD], **change}).message


def test_images_are_found_beside_the_file_and_counted(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"png")
    found = str(tmp_path / "cat.png")
    placeholders = {"messages": [{"role": "user", "content": "<image>what?"}, GOOD], "images": ["cat.png"]}
    assert read(tmp_path, placeholders)["images"] == [found]
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "cat.png"}}]
    row = read(tmp_path, {"messages": [{"role": "user", "content": parts}, GOOD]})
    assert row["images"] == [found]
    assert row["messages"][0]["content"] == [{"type": "text", "text": "what?"}, {"type": "image"}]
    two = {"messages": [{"role": "user", "content": [*parts, parts[1]]}, GOOD]}
    assert read(tmp_path, two)["images"] == [found, found]
    assert "no image file" in refusal(tmp_path, {**placeholders, "images": ["dog.png"]}).message
    assert "a URL" in refusal(tmp_path, {**placeholders, "images": ["https://x/y.png"]}).message
    assert (
        "1 placeholder for images, but 2"
        in refusal(tmp_path, {**placeholders, "images": ["cat.png"] * 2}).message
    )


def test_loss_weights_are_read_as_weights(tmp_path: Path) -> None:
    rows = {"messages": [{**ASK, "loss_weight": 0.0}, {**GOOD, "loss_weight": 1.0}]}
    assert read(tmp_path, rows) == {"messages": [{**ASK, "weight": 0}, GOOD]}
    rows["messages"][0]["loss_weight"] = 1.0
    assert read(tmp_path, rows) == {"messages": [{**ASK, "weight": 1}, GOOD]}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "rows", "kind", "key"),
    [
        ("dpo_en_demo.json", 300, "preference", "prompt"),
        ("kto_en_demo.json", 300, "unpaired", "prompt"),
        ("glaive_toolcall_en_demo.json", 300, "supervised", "messages"),
        ("v1_sft_demo.jsonl", 500, "supervised", "messages"),
        ("v1_dpo_demo.jsonl", 10, "preference", "chosen"),
    ],
)
def test_llama_factorys_demo_files_load(
    shared_folder: Path, file: str, rows: int, kind: str, key: str
) -> None:
    loaded = load_rows(shared_folder / "data/llamafactory_demo" / file)
    assert len(loaded) == rows
    assert {kind_of(row) for row in loaded} == {kind}
    assert all(row[key] for row in loaded)
