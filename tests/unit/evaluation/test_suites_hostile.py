"""Rows and templates of strangers: what is too deep, too long or too large is refused by key or file, or is text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.errors import ErrorCode, GymError
from gym_fed.evaluation.suites import row_files
from gym_fed.evaluation.suites.rendering import TemplateProblem, parse, render, value_of
from gym_fed.evaluation.suites.row_files import read_rows


@pytest.mark.parametrize("text", ["²", "1" * 5000])
def test_digits_that_are_no_number_of_a_choice_are_text(text: str) -> None:
    config = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "doc_to_choice": ["x", "y"]}
    found = render(config, {"q": text, "a": "1"})
    assert (found.prompt, found.gold) == (text, (1,))


@pytest.mark.parametrize("inside", ["-" * 200_000, "1+" * 20_000])
def test_a_target_that_is_too_deep_for_a_list_is_text(inside: str) -> None:
    assert value_of("doc_to_target", "{{a}}", {"a": f"[{inside}1]"}, False) == f"[{inside}1]"


@pytest.mark.parametrize("template", ["{{" + "(" * 100_000, "{{" + "-" * 100_000 + "1}}"])
def test_a_template_that_is_too_deep_is_refused_by_key(template: str) -> None:
    with pytest.raises(TemplateProblem, match="doc_to_text: no Jinja template: nested too deeply"):
        parse("doc_to_text", template)


def test_a_template_that_calls_itself_is_refused_by_key() -> None:
    with pytest.raises(TemplateProblem, match="doc_to_text: fails: it is nested too deeply, or calls itself"):
        value_of("doc_to_text", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, False)


def test_a_parquet_file_whose_rows_share_a_large_value_is_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(row_files, "MAX_BYTES", 1 << 20)
    file = tmp_path / "rows.parquet"
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500), pyarrow.array(["x" * 10_000]))
    parquet.write_table(pyarrow.table({"text": column}), file)
    assert file.stat().st_size < 20_000
    with pytest.raises(GymError, match=r"rows\.parquet: more than 1048576 bytes") as caught:
        read_rows(file)
    assert caught.value.code is ErrorCode.TOO_LARGE
    parquet.write_table(pyarrow.table({"text": column[:50]}), file)
    assert read_rows(file) == [{"text": "x" * 10_000}] * 50


def test_a_parquet_file_of_more_rows_than_a_set_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(row_files, "MAX_ROWS", 1000)
    parquet.write_table(
        pyarrow.table({"text": pyarrow.nulls(1001, pyarrow.int8())}), tmp_path / "rows.parquet"
    )
    with pytest.raises(GymError, match="more than 1000 rows") as caught:
        read_rows(tmp_path / "rows.parquet")
    assert caught.value.code is ErrorCode.TOO_LARGE
