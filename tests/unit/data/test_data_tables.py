"""Tables hold what rows hold: text that is JSON stays text in CSV, and Parquet drops no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import GymError
from gym_fed.data import load_rows
from gym_fed.data.files import cell_value
from gym_fed.data.writing import write_rows

PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
}


def test_answers_in_json_are_learnt_as_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "json.csv"
    file.write_text('prompt,completion\nGive JSON,"{""a"": 1}"\nA list,"[1, 2]"\n', encoding="utf-8")
    rows = load_rows(file)
    assert [row["completion"] for row in rows] == ['{"a": 1}', "[1, 2]"]


def test_only_turns_make_a_conversation() -> None:
    assert cell_value("prompt", '[{"role": "user", "content": "hi"}]') == [{"role": "user", "content": "hi"}]
    assert cell_value("chosen", '{"from": "gpt", "value": "x"}') == {"from": "gpt", "value": "x"}
    assert cell_value("prompt", '[{"name": "user"}]') == '[{"name": "user"}]'
    assert cell_value("prompt", "[]") == "[]"
    assert cell_value("images", '["a.jpg"]') == ["a.jpg"]


@pytest.mark.parametrize("rows", [[PLAIN, WITH_TOOLS], [WITH_TOOLS, PLAIN]])
def test_parquet_keeps_keys_that_only_some_rows_have(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", rows)
    assert load_rows(tmp_path / "rows.parquet") == rows


def test_a_key_that_comes_too_late_for_parquet_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}] * 10_001 + [{"prompt": "a", "answer": "b", "tests": "t"}]
    with pytest.raises(GymError, match="keys that earlier rows lack"):
        write_rows(tmp_path / "rows.parquet", rows)
    assert not list(tmp_path.iterdir())
