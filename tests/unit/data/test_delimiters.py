"""Which character separates the columns of a CSV file, for all that reads one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gym_fed.core.errors import GymError
from gym_fed.data.bounded import delimiter_of
from gym_fed.data.paging import PagedFile
from gym_fed.data.reading import load_rows
from gym_fed.evaluation.probe.prompts import read_prompts
from gym_fed.evaluation.suites.row_files import read_rows

ROWS = [
    {"prompt": "How, then; or when?", "completion": 'Say "so";\nor\tso | so'},
    {"prompt": "Why?", "completion": "Because, well."},
]


def export(file: Path, delimiter: str, *, encoding: str = "utf-8", quoting: int = csv.QUOTE_MINIMAL) -> Path:
    with file.open("w", newline="", encoding=encoding) as stream:
        writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
        writer.writeheader()
        writer.writerows(ROWS)
    return file


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_table_gives_the_same_rows_whatever_separates_its_columns(
    tmp_path: Path, delimiter: str, encoding: str, quoting: int
) -> None:
    file = export(tmp_path / "mine.csv", delimiter, encoding=encoding, quoting=quoting)
    assert load_rows(file) == ROWS
    assert [row.load() for row in PagedFile(file, "mine.csv").rows()] == ROWS
    assert read_rows(file) == ROWS
    assert [prompt.ask for prompt in read_prompts(file).harmful] == [row["prompt"] for row in ROWS]


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        ('"Question, asked";Answer\nHow?;So.\n', ";"),
        ("Question, asked;Answer\nHow?;So.\n", ";"),
        ("text,n\nx;y,1\n", ","),
        ("text\na;b\n", ","),
        ("a;b\nno cells\n", ","),
        ("a;b\n", ","),
        ("text;score\r\n\r\nHallo, Welt;1,5\r\n", ";"),
        ("", ","),
    ],
)
def test_a_delimiter_is_one_that_splits_the_header_and_the_first_row_alike(text: str, delimiter: str) -> None:
    assert delimiter_of(".csv", text) == delimiter
    assert delimiter_of(".csv", text.encode("utf-8-sig")) == delimiter
    assert delimiter_of(".tsv", text) == "\t"


def test_a_row_of_another_length_is_refused_with_the_files_own_delimiter(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("prompt;completion\na;b\nc;d;e\n")
    with pytest.raises(GymError, match=r"mine\.csv:3: more cells than the header has") as caught:
        load_rows(file)
    assert caught.value.hint == "quote cells that contain ';'"
    with pytest.raises(GymError) as caught:
        [row.load() for row in PagedFile(file, "mine.csv").rows()]
    assert caught.value.hint == "quote cells that contain ';'"
