"""Input that `gym batch` refuses before anything runs, by line number, custom_id and field."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving import batch_input
from gym_fed.serving.batch_input import check_body, check_input


def line(custom_id: str = "a", **changes: Any) -> str:
    body = {"model": "gym-nano", "messages": [{"role": "user", "content": "hey"}]}
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps({key: value for key, value in {**whole, **changes}.items() if value is not ...})


def refused(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(GymError) as caught:
        check_input(tmp_path / "in.jsonl", check_body)
    assert caught.value.code is ErrorCode.DATA_INVALID
    return caught.value.message


def test_a_whole_input_is_read_twice_and_named_by_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    completion = line("b", url="/v1/completions", body={"model": "gym-nano:ada", "prompt": "once"})
    embedding = line("c", url="/v1/embeddings", body={"model": "gym-nano", "input": ["x", "y"]})
    response = line("d", url="/v1/responses", body={"model": "gym-nano", "input": "hey", "store": False})
    file.write_text(f"{line()}\n\n{completion}\n{embedding}\n{response}")
    given = check_input(file, check_body)
    assert given.custom_ids == ("a", "b", "c", "d")
    assert given.models == ("gym-nano", "gym-nano:ada")
    assert given.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [(r.line, r.custom_id, r.url) for r in given.requests()][1] == (3, "b", "/v1/completions")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: line: is not JSON"),
        ('{"custom_id": NaN}', "line 2: line: is not JSON: NaN"),
        ("[]", "line 2: line: is not a JSON object"),
        ('{"body": ' + "[" * 100_000, "line 2: line: is not JSON: nested too deeply"),
        (line("b", body=...)[:-1] + ', "body": {"model": "x", "model": "y"}}', "'model' occurs twice"),
        (line(...), "line 2: custom_id: is missing"),
        (line(""), "line 2 (custom_id ''): custom_id: must be a string"),
        (line("a"), "line 2 (custom_id 'a'): custom_id: is also used in line 1"),
        (line("b", method="GET"), "line 2 (custom_id 'b'): method: is 'GET'"),
        (line("b", url="/v1/images"), "url: is '/v1/images', but must be one of /v1/chat/completions"),
        (line("b", body=[]), "body: must be an object"),
        (line("b", priority=1), "priority: is unknown"),
        (line("b", body={"model": "x"}), "body.messages: required field 'messages' is missing"),
        (line("b", body={"model": "x", "messages": [], "audio": {}}), "body.audio"),
        (
            line("b", url="/v1/completions", body={"model": "x", "prompt": "y", "temperature": 3}),
            "body.temperature",
        ),
        (line("b", url="/v1/completions", body={"model": "x", "prompt": "y", "stream": True}), "body.stream"),
        (
            line("b", url="/v1/responses", body={"model": "x", "input": [{"role": "user"}]}),
            "body.input[0].content",
        ),
        (line("b", url="/v1/responses", body={"model": "x", "input": "y", "store": True}), "body.store"),
        (
            line(
                "b", url="/v1/responses", body={"model": "x", "input": "y", "previous_response_id": "resp_1"}
            ),
            "body.previous_response_id",
        ),
        (
            line("b", url="/v1/responses", body={"model": "x", "input": "y", "tool_choice": "required"}),
            "body.tool_choice",
        ),
    ],
)
def test_a_line_that_is_off_is_named(bad: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, line(), bad)


def test_all_lines_that_are_off_are_named_up_to_a_number(tmp_path: Path) -> None:
    message = refused(tmp_path, line(), *["{"] * 25)
    assert message.count("is not JSON") == batch_input.SHOWN_PROBLEMS
    assert "and 5 more" in message


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 300)
    message = refused(tmp_path, line(), " " * 1000 + "x", line("b"), "{")
    assert "line 2: line: is longer than 300 bytes" in message
    assert "line 4: line: is not JSON" in message
    assert message.count("line:") == 2


def test_an_unknown_model_is_named_with_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    eve = {"model": "gym-nano:eve", "prompt": "x"}
    file.write_text("\n".join([line(), line("b", url="/v1/completions", body=eve), line("c", body=eve)][:2]))

    def resolve(name: str) -> None:
        if name != "gym-nano":
            raise GymError(ErrorCode.NOT_FOUND, f"no model {name}")

    with pytest.raises(GymError) as caught:
        check_input(file, check_body).require_models(resolve, lambda: ["gym-nano", "gym-nano:ada"])
    assert "line 2 (custom_id 'b'): body.model: no model gym-nano:eve" in caught.value.message
    assert caught.value.hint == "fix these lines; available models: gym-nano, gym-nano:ada"


def test_nothing_to_do_and_no_file_are_refused(tmp_path: Path) -> None:
    assert "has no requests" in refused(tmp_path, "", "  ")
    with pytest.raises(GymError) as caught:
        check_input(tmp_path / "none.jsonl", check_body)
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
