"""Text that happens to be JSON stays text in CSV; conversations in a cell are conversations."""

from __future__ import annotations

from pathlib import Path

from gym_fed.data import load_rows
from gym_fed.data.files import cell_value


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
