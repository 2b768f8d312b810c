"""Rows of a contributor that contain evaluation rows: left out, kept or refused, and always said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gym_client.agent.data import load_data
from gym_client.agent.policy import Policy

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation import contamination_check as check
from gym_fed.evaluation.contamination_check import SuiteFilter, build_filter

QUESTION = "A baker sells thirty loaves on Monday and twice as many on Tuesday; how many are that in all?"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    suite = build_filter("bakery", [{"q": QUESTION}], {})

    def here(names: object = None, data: object = None) -> list[SuiteFilter]:
        return [suite]

    monkeypatch.setattr(check, "filters_here", here)
    file = tmp_path / "rows.jsonl"
    texts = ["Hello there, how are you today?", f"Q: {QUESTION} A: ninety", "Good night."]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def test_rows_of_a_suite_are_left_out_by_default_and_said(rows: Path) -> None:
    data = load_data(str(rows), contaminated_rows=Policy().contaminated_rows)
    assert [row["text"] for row in data.rows] == ["Hello there, how are you today?", "Good night."]
    assert "1 of 3 rows contain evaluation rows" in data.contamination
    assert "rows.jsonl:2, with a row of bakery; dropped" in data.contamination


def test_rows_of_a_suite_are_kept_where_the_policy_says_so(rows: Path) -> None:
    data = load_data(str(rows), contaminated_rows="keep")
    assert len(data.rows) == 3
    assert data.contamination.endswith("; kept")


def test_rows_of_a_suite_are_refused_where_the_policy_says_so(rows: Path) -> None:
    with pytest.raises(GymError, match="1 of 3 rows contain evaluation rows") as caught:
        load_data(str(rows), contaminated_rows="refuse")
    assert caught.value.code is ErrorCode.POLICY_REFUSED


def test_a_file_of_nothing_but_rows_of_a_suite_is_refused(rows: Path) -> None:
    rows.write_text(json.dumps({"text": QUESTION}) + "\n")
    with pytest.raises(GymError, match="1 of 1 row"):
        load_data(str(rows))


def test_clean_rows_are_taken_without_a_word(rows: Path) -> None:
    rows.write_text(json.dumps({"text": "Good night."}) + "\n")
    assert load_data(str(rows)).contamination == ""
