"""Empty cells and missing columns: each is refused for what it is, and an optional cell may be empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.core.errors import GymError
from gym_fed.data.formats.base import BadRow
from gym_fed.data.paging import PagedFile
from gym_fed.data.reading import load_rows, renaming

ASKED = {"prompt": "question", "completion": "answer"}


@pytest.mark.parametrize("body", ["a,\nb,c\n", "b,c\na,\n"])
def test_an_empty_cell_is_refused_by_its_row_and_column(tmp_path: Path, body: str) -> None:
    file = tmp_path / "mine.csv"
    line = 2 + body.splitlines().index("a,")
    partly = {"prompt": "question"}
    for names, columns in (
        ("question,answer", ASKED),
        ("prompt,completion", None),
        ("question,completion", partly),
    ):
        file.write_text(f"{names}\n{body}")
        empty = names.partition(",")[2]
        with pytest.raises(GymError, match=rf"mine\.csv:{line}: (column )?'{empty}' is empty \(") as caught:
            load_rows(file, columns=columns)
        assert caught.value.hint == "fill it in, or delete the row"


def test_an_empty_value_of_json_is_refused_by_its_row_and_column(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    for value in ("null", '""', '" "'):
        file.write_text('{"question": "a", "answer": "b"}\n{"question": "a", "answer": ' + value + "}\n")
        with pytest.raises(GymError, match=r"mine\.jsonl:2: column 'answer' is empty \("):
            load_rows(file, columns=ASKED)


def test_a_column_that_a_file_does_not_have_is_refused_with_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("question,reply,note\na,,\n")
    with pytest.raises(GymError, match=r"mine\.csv:2: has no column 'answer' \(") as caught:
        load_rows(file, columns=ASKED)
    assert caught.value.hint == "use one of its columns: question, reply, note"


def test_an_optional_cell_may_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("question,context,answer\na,,b\nc,d,e\n")
    rows = load_rows(file, columns={"instruction": "question", "input": "context", "output": "answer"})
    assert [row["messages"][0]["content"] for row in rows] == ["a", "c\nd"]


def test_a_paged_row_knows_its_empty_cells_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("question,answer\na,\n")
    rename = renaming(ASKED)
    assert rename is not None
    (row,) = PagedFile(file, "mine.csv").rows()
    with pytest.raises(BadRow, match="column 'answer' is empty"):
        rename(row.load())


@pytest.mark.parametrize("columns", [ASKED, None])
def test_all_rows_with_an_empty_cell_are_counted_at_the_first(
    tmp_path: Path, columns: dict[str, str] | None
) -> None:
    file = tmp_path / "mine.csv"
    header = ",".join(columns.values() if columns else ASKED)
    file.write_text(f"{header}\na,b\na,\na,b\n,b\na,\na,b\n")
    with pytest.raises(GymError, match=r"mine\.csv:3: .* is empty; 3 of the first 6 rows have an empty cell"):
        load_rows(file, columns=columns)
    file.write_text(f"{header}\na,\na,b\na,b,c\n")
    with pytest.raises(GymError, match=r"mine\.csv:2: .* is empty \("):
        load_rows(file, columns=columns)
