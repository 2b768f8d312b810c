"""Dataset files: four formats, recognised by their keys; a bad row is named by file and line with its remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import load_rows

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    "alpaca": {"instruction": "hi", "input": "", "output": "ho"},
}


@pytest.mark.parametrize("format", ["auto", "named"])
@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_every_chat_format_becomes_messages(tmp_path: Path, name: str, suffix: str, format: str) -> None:
    file = tmp_path / f"data{suffix}"
    rows = [ROWS[name]] * 2
    file.write_text(json.dumps(rows) if suffix == ".json" else "".join(json.dumps(r) + "\n\n" for r in rows))
    assert load_rows(file, name if format == "named" else "auto") == [{"messages": CHAT}] * 2


def test_text_rows_and_whole_text_files_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "once upon"}\n')
    (tmp_path / "b.txt").write_text("once\nupon\n")
    assert load_rows(tmp_path / "a.jsonl") == [{"text": "once upon"}]
    assert load_rows(tmp_path / "b.txt") == [{"text": "once\nupon\n"}]


def test_alpaca_keeps_input_system_and_history_in_order(tmp_path: Path) -> None:
    row = {"instruction": "Sum", "input": "1 2", "output": "3", "system": "Be brief", "history": [["a", "b"]]}
    (tmp_path / "a.json").write_text(json.dumps([row]))
    messages = load_rows(tmp_path / "a.json")[0]["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "Sum\n1 2"


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        ("{oops", "not valid JSON", "one JSON object"),
        ("[1]", "expected a JSON object", "{ ... }"),
        ('{"messages": []}', "'messages' is not a list of turns", "user and an assistant"),
        (
            '{"messages": [{"role": "robot", "content": "x"}]}',
            "role 'robot' is unknown",
            "system, user, assistant",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', "'content' is int", "as a JSON string"),
        ('{"other": 1}', "'messages' is not a list", "user and an assistant"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, problem: str, remedy: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(ROWS["messages"]) + "\n" + line + "\n")
    with pytest.raises(GymError) as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert caught.value.message.startswith(f"{file}:2: ")
    assert problem in caught.value.message
    assert remedy in caught.value.hint


def test_openai_text_parts_are_joined_and_other_parts_refused(tmp_path: Path) -> None:
    file = tmp_path / "parts.jsonl"
    parts: list[dict[str, str]] = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}, CHAT[1]]}))
    assert load_rows(file) == [{"messages": CHAT}]
    parts[1] = {"type": "file", "file": "x"}
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}, CHAT[1]]}))
    with pytest.raises(GymError, match="parts that are not text"):
        load_rows(file)


def test_an_unknown_sharegpt_speaker_and_an_empty_alpaca_answer_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps([{"conversations": [{"from": "alien", "value": "x"}]}]))
    with pytest.raises(GymError, match=r"row 1: 'from' is 'alien'"):
        load_rows(file)
    file.write_text(json.dumps([{"instruction": "x", "output": " "}]))
    with pytest.raises(GymError, match=r"row 1: 'output' is empty"):
        load_rows(file)


def test_files_that_cannot_be_recognised_or_read_are_refused(tmp_path: Path) -> None:
    cases = {
        "keys.jsonl": (b'{"a": 1, "b": 2}\n', "no known format"),
        "empty.jsonl": (b"\n", "contains no rows"),
        "latin.jsonl": (b'{"text": "\xe9"}\n', "not UTF-8 at byte 10"),
        "object.json": (b'{"text": "x"}', "expected a list of rows"),
        "cut.json": (b'[{"text": "x"},\n', "not valid JSON"),
    }
    for name, (content, problem) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(GymError, match=problem) as caught:
            load_rows(tmp_path / name)
        assert caught.value.code is ErrorCode.DATA_INVALID
        assert name in caught.value.message
        assert caught.value.hint
    with pytest.raises(GymError) as caught:
        load_rows(tmp_path / "none.jsonl")
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "rows", "key"),
    [
        ("sharegpt_dummy/dummy_conversation.json", 500, "messages"),
        ("llamafactory_demo/kto_en_demo.json", 300, "completion"),
        ("llamafactory_demo/c4_demo.jsonl", 300, "text"),
        ("llamafactory_demo/identity.json", 91, "messages"),
    ],
)
def test_datasets_of_the_world_load(shared_folder: Path, file: str, rows: int, key: str) -> None:
    loaded = load_rows(shared_folder / "data" / file)
    assert len(loaded) == rows
    assert all(row[key] for row in loaded)
