"""Paging gives the rows and places that reading gives, from any row, and never loads one that is too large."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.files import find_files, read_raw
from gym_fed.data.page_layouts import MAX_ROW_BYTES
from gym_fed.data.paging import PagedFile, is_data_file

ROWS = [{"text": f'row {number}\n\u00e9, "quoted"', "source": "ab"[number % 2]} for number in range(700)]


def written(path: Path) -> Path:
    """``ROWS`` in a file of any kind."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=300)
        return path
    if name.endswith(".csv"):
        import csv
        import io

        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, ["text", "source"])
        writer.writeheader()
        writer.writerows(ROWS)
        data = stream.getvalue().encode()
    elif name.endswith(".json"):
        data = json.dumps(ROWS, indent=1).encode()
    else:
        data = b"\n".join(json.dumps(row).encode() for row in ROWS)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.json", "a.parquet"])
def test_pages_are_what_is_read_from_any_row(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name)
    wanted = list(read_raw(find_files(path)[0]))
    file = PagedFile(path, str(path))
    assert [(row.place, row.load()) for row in file.rows()] == wanted
    assert file.num_rows == len(ROWS)
    for start in (0, 127, 128, 129, 512, 699):
        found = next(row for row in file.rows(start) if row.number == start)
        assert (found.place, found.load()) == wanted[start]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json", "a.parquet"])
def test_a_late_page_of_a_known_file_begins_near_it(tmp_path: Path, name: str) -> None:
    file = PagedFile(written(tmp_path / name), name)
    list(file.rows())
    assert next(file.rows(600)).number == 512


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_the_rows_of_a_small_file_are_counted(tmp_path: Path, name: str) -> None:
    file = PagedFile(written(tmp_path / name), name)
    next(file.rows())
    assert file.about_rows() == file.num_rows == len(ROWS)


def test_a_small_file_whose_end_is_broken_has_an_estimate(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "one"}, {"text": "two"}, {"text": ')
    file = PagedFile(path, "a.json")
    next(file.rows())
    assert (file.about_rows() or 0) >= 2
    assert file.num_rows is None


def test_the_number_of_rows_of_a_large_file_is_estimated_until_the_end_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.data.paging._COUNTED_BYTES", 0)
    file = PagedFile(written(tmp_path / "a.jsonl"), "a.jsonl")
    assert file.about_rows() is None
    list(islice(file.rows(), 100))
    assert file.num_rows is None
    assert file.about_rows() == pytest.approx(700, rel=0.1)
    assert PagedFile(written(tmp_path / "a.parquet"), "a.parquet").num_rows == 700


def test_a_row_that_is_too_large_is_named_and_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    large = json.dumps({"text": "x" * (3 * MAX_ROW_BYTES)})
    path.write_text(f'{{"text": "before"}}\n{large}\n{{"text": "after"}}\n')
    before, row, after = PagedFile(path, "a.jsonl").rows()
    assert (before.load(), after.load()) == ({"text": "before"}, {"text": "after"})
    assert after.place == "a.jsonl:3"
    assert row.num_bytes == len(large) + 1
    assert len(row.head) <= 4096
    with pytest.raises(GymError) as refused:
        row.load()
    assert refused.value.code is ErrorCode.TOO_LARGE


def test_a_broken_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": \n\xff\xfe\n{"text": "b"}\n')
    rows = list(PagedFile(path, "a.jsonl").rows())
    assert [row.place for row in rows] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]
    assert rows[3].load() == {"text": "b"}
    for row in rows[1:3]:
        with pytest.raises(GymError, match=row.place):
            row.load()


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.json", b'{"rows": []}', "expected a list"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "not valid JSON"),
        ("a.csv", b'a,b\n1,2\n"x\n', "not valid CSV"),
        ("a.csv", b'a,"b\n', "not valid CSV"),
        ("a.csv", b"a,b\n1,2\n3,gr\xf6\xdfe\n", "a.csv: not UTF-8 near line 3"),
        ("a.csv", b"a,gr\xf6\xdfe\n1,2\n", "a.csv: not UTF-8 near line 1"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "a.csv: not UTF-8 near line 1"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet"),
        ("a.jsonl.gz", b"no gzip", "cannot be read|not a gzip"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(
    tmp_path: Path, name: str, data: bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(GymError, match=problem):
        [row.load() for row in PagedFile(path, name).rows()]


@pytest.mark.parametrize(
    ("name", "data", "wanted"),
    [
        ("a.jsonl", b"{}", True),
        ("a.json", b' \n[{"a": 1}]', True),
        ("config.json", b'{"a": 1}', False),
        ("a.csv", b"", True),
        ("a.txt", b"words", False),
        ("a.py", b"[", False),
        ("a.json.gz", gzip.compress(b"[]", mtime=0), True),
    ],
)
def test_data_files_are_known_by_suffix_and_lists(
    tmp_path: Path, name: str, data: bytes, wanted: Any
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert is_data_file(path) is wanted
