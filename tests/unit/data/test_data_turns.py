"""What is not to be learned, what was thought, and keys that nobody reads: each is kept, refused or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gym_fed.base.models import load_tokenizer
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows
from gym_fed.data.encoding import encode_rows
from gym_fed.data.row_counts import IGNORED
from gym_fed.data.rows import as_kind, unread_in_words, unread_keys

ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}


def written(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(tmp_path: Path, row: Any) -> dict[str, Any]:
    (found,) = load_rows(written(tmp_path, row))
    return dict(found)


def refusal(tmp_path: Path, row: Any) -> str:
    with pytest.raises(GymError) as caught:
        load_rows(written(tmp_path, row))
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert f"{tmp_path / 'rows.jsonl'}:1: " in caught.value.message
    return caught.value.message


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", *(str(word) for word in words)])


@pytest.mark.parametrize(
    "key", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss_weight": 0}]
)
def test_every_way_to_say_do_not_learn_becomes_weight_0(key: dict[str, Any], tmp_path: Path) -> None:
    expected = {"messages": [ASK, {**SAY, "weight": 0}, ASK, SAY]}
    assert read(tmp_path, {"messages": [ASK, {**SAY, **key}, ASK, SAY]}) == expected
    assert read(tmp_path, {"conversations": [HUMAN, {**GPT, **key}, HUMAN, GPT]}) == expected


@pytest.mark.parametrize(
    "key", [{"weight": 1}, {"train": True}, {"training": True}, {"loss_weight": 1.0}, {"weight": None}]
)
def test_a_weight_of_1_is_what_an_answer_has_anyway(key: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, {"messages": [ASK, {**SAY, **key}]}) == {"messages": [ASK, SAY]}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"weight": 0.5}, "'weight' of the assistant's turn is 0.5, expected 0 or 1"),
        ({"weight": "0"}, "'weight' of the assistant's turn is '0', expected 0 or 1"),
        ({"train": 0}, "'train' of the assistant's turn is 0, expected true or false"),
        ({"weight": 1, "train": False}, "'weight' and 'train' of one turn differ"),
        (
            {"thinking": "a", "reasoning_content": "b"},
            "'reasoning_content' and 'thinking' of one turn differ",
        ),
        ({"thinking": ["a"]}, "'thinking' is list, expected text"),
    ],
)
def test_a_weight_or_reasoning_that_cannot_be_honoured_is_refused_by_its_place(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refusal(tmp_path, {"messages": [ASK, {**SAY, **keys}]})


def test_a_users_turn_that_is_learned_keeps_its_weight_and_has_no_reasoning(tmp_path: Path) -> None:
    assert read(tmp_path, {"messages": [{**ASK, "train": True}, SAY]}) == {
        "messages": [{**ASK, "weight": 1}, SAY]
    }
    assert "in a turn of the user" in refusal(tmp_path, {"messages": [{**ASK, "thinking": "hm"}, SAY]})


def test_an_answer_that_is_judged_may_not_be_left_unlearned(tmp_path: Path) -> None:
    pair = {"prompt": [ASK], "chosen": [{**SAY, "weight": 0}], "rejected": "no"}
    assert "weight 0" in refusal(tmp_path, pair)
    assert "weight 0" in refusal(tmp_path, {"messages": [ASK, {**SAY, "weight": 0}], "label": True})


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_what_the_assistant_thought_is_kept(key: str, tmp_path: Path) -> None:
    expected = {"messages": [ASK, {**SAY, "reasoning_content": "hm"}]}
    assert read(tmp_path, {"messages": [ASK, {**SAY, key: "hm"}]}) == expected
    assert read(tmp_path, {"conversations": [HUMAN, {**GPT, key: "hm"}]}) == expected


def test_rows_to_forget_stay_rows_to_forget(tmp_path: Path) -> None:
    for row in ({"messages": [ASK, SAY]}, {"text": "a"}, {"instruction": "a", "output": "b"}):
        assert read(tmp_path, {**row, "forget": True})["forget"] is True
        assert "forget" not in read(tmp_path, {**row, "forget": False})
        assert "'forget' is 'yes'" in refusal(tmp_path, {**row, "forget": "yes"})


def test_a_text_with_tools_or_a_system_prompt_is_refused(tmp_path: Path) -> None:
    assert "has 'system', which rows with 'text' do not support" in refusal(
        tmp_path, {"text": "a", "system": "b"}
    )


def test_keys_that_nobody_reads_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, {**SAY, "mood": 1}], "id": 7, "\x1b[2J": 1}, {"messages": [ASK, SAY], "id": 8}]
    found = load_rows(written(tmp_path, *rows))
    assert unread_keys(found) == {"id": 2, "a message's mood": 1, "\x1b[2J": 1}
    assert unread_keys(as_kind(found, "supervised")) == unread_keys(found)
    said = str(unread_in_words(unread_keys(found)))
    assert said.startswith("not read: id (2 rows), ")
    assert "\x1b" not in said
    assert unread_in_words({}) is None


def test_show_and_convert_say_which_keys_are_not_read(tmp_path: Path) -> None:
    file = written(tmp_path, {"messages": [ASK, SAY], "id": 7})
    assert "not read: id (1 row)" in gym("show", file).output
    done = gym("convert", file, tmp_path / "out.jsonl", "--to", "sharegpt")
    assert "not read: id (1 row)" in done.output
    asked = gym("convert", file, tmp_path / "out2.jsonl", "--to", "sharegpt", "--json")
    assert json.loads(asked.stdout)["unread"] == {"id": 1}


WEIGHTED = {"messages": [ASK, {**SAY, "weight": 0, "reasoning_content": "hm"}, ASK, SAY]}


@pytest.mark.parametrize("format", ["messages", "sharegpt", "completion"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_convert_keeps_weights_and_reasoning_where_the_format_holds_them(
    format: str, suffix: str, tmp_path: Path
) -> None:
    out = tmp_path / f"out{suffix}"
    row = {**WEIGHTED, "forget": True}
    assert gym("convert", written(tmp_path, row), out, "--to", format).exit_code == 0
    assert [dict(found) for found in load_rows(out, format)] == [row]


@pytest.mark.parametrize(
    ("row", "format", "said"),
    [
        (WEIGHTED, "alpaca", "would lose 'reasoning_content' of message 2, 'weight' of message 2"),
        (
            {"messages": [ASK, {**SAY, "thinking": "hm"}]},
            "prompt",
            "would lose 'reasoning_content' of its answer",
        ),
        ({"messages": [ASK, SAY], "tools": [{"name": "f"}]}, "text", "has speakers"),
    ],
)
def test_convert_refuses_what_the_format_would_lose_by_row_and_key(
    row: dict[str, Any], format: str, said: str, tmp_path: Path
) -> None:
    file, out = written(tmp_path, {"messages": [ASK, SAY]}, row), tmp_path / "out.jsonl"
    if format == "text":
        file = written(tmp_path, row)
    done = CliRunner().invoke(app, ["data", "convert", str(file), str(out), "--to", format])
    assert isinstance(done.exception, GymError)
    assert said in done.exception.message
    assert str(file) in done.exception.message
    assert not out.exists()


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}, {"training": False}, {"loss_weight": 0.0}])
def test_what_a_file_says_not_to_learn_has_no_label(key: dict[str, Any], tmp_path: Path) -> None:
    row = {"conversations": [HUMAN, {**GPT, "value": "never this", **key}, HUMAN, GPT]}
    tokenizer = load_tokenizer("gym-nano")
    (encoded,) = encode_rows(tokenizer, load_rows(written(tmp_path, row)), max_length=256)
    assert "never this" in tokenizer.decode(encoded["input_ids"])
    learned = tokenizer.decode([label for label in encoded["labels"] if label != IGNORED])
    assert "never this" not in learned
    assert "ho" in learned
