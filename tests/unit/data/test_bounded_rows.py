"""Rows that are too long, in another encoding or no text are refused by file, place and remedy, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, parquet

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import bounded, files
from gym_fed.data.bounded import MAX_ROW_BYTES, JsonItems
from gym_fed.data.files import find_files, read_raw
from gym_fed.data.reading import load_rows
from gym_fed.data.rows import as_kind
from gym_fed.training.rows.run_rows import rows_of_run

MIB = 1 << 20
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def packed(file: Path, head: bytes, tail: bytes, mib: int = 80) -> Path:
    """A file with one very long text in it, which is small on the disk."""
    with gzip.open(file, "wb", compresslevel=1) as out:
        out.write(head)
        for _ in range(mib):
            out.write(b"a" * MIB)
        out.write(tail)
    assert file.stat().st_size < MIB
    return file


LONG = {
    "rows.jsonl.gz": (b'{"text": "ok"}\n{"text": "', b'"}\n', ":2: the line"),
    "rows.json.gz": (b'[{"text": "ok"},\n{"text": "', b'"}]\n', ":2: row 2"),
    "rows.csv.gz": (b'text\nok\n"', b'"\n', ":3: the row"),
    "lines.csv.gz": (b'text\nok\n"b\n', b'"\n', ":3: the row"),
    "rows.txt.gz": (b"", b"", ": the text"),
}


@pytest.mark.parametrize("name", sorted(LONG))
def test_a_row_that_is_too_long_is_refused_by_its_place(tmp_path: Path, name: str) -> None:
    head, tail, place = LONG[name]
    file = packed(tmp_path / name, head, tail)
    with pytest.raises(GymError) as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert caught.value.message == f"{file}{place} is longer than 64 MiB"
    assert caught.value.hint


def test_a_line_of_400_mib_is_refused_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        for _ in range(400):
            out.write(b"a" * MIB)
    code = (
        "import resource, sys\nfrom gym_fed.data.reading import load_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    load_rows(sys.argv[1])\nexcept Exception as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    said, grown_kib = done.stdout.strip().rsplit("\n", 1)
    assert ":1: the line is longer than 64 MiB" in said
    assert int(grown_kib) < 4 * MAX_ROW_BYTES >> 10


def test_a_parquet_row_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", MIB)
    for name, texts, place in (
        ("few.parquet", ["ok", "a" * (3 * MIB)], "one of the rows 1 to 2"),
        ("many.parquet", ["ok"] * 9 + ["a" * (2 * MIB)], "row 10"),
    ):
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
        with pytest.raises(GymError, match=f"{name}: {place} is longer than 64 MiB"):
            load_rows(tmp_path / name)


def test_a_long_list_of_short_rows_is_read(tmp_path: Path) -> None:
    rows = [{"text": f"row {number} " + "x" * 500} for number in range(5000)]
    for name, text in (("a.json", json.dumps(rows)), ("b.jsonl", "\n\n" + json.dumps(rows, indent=1))):
        (tmp_path / name).write_text(text)
        assert [dict(row) for row in load_rows(tmp_path / name)] == rows


@given(st.lists(JSON, max_size=5), st.integers(1, 7), st.sampled_from([None, 1]), st.booleans())
def test_items_are_what_json_reads_however_the_bytes_arrive(
    items: list[Any], chunk: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only)
    before, bounded._CHUNK_BYTES = bounded._CHUNK_BYTES, chunk
    try:
        data = text.encode("utf-8", "surrogatepass")
        found = list(JsonItems("a.json", io.BufferedReader(bounded._Unbuffered(io.BytesIO(data)), 16)))
    finally:
        bounded._CHUNK_BYTES = before
    assert [value for _, value in found] == json.loads(text)
    if indent is None:
        assert {line for line, _ in found} <= {1}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[{"a": 1},\n {"a": tru}]', "2:8"),
        ('[{"a": 1},\n {"a": 2} {"b": 1}]', "2:11"),
        ('[{"a": 1}', "1:10"),
        ('[{"a": "x]', "1:8"),
        ('[\n{"a": 1}]\nmore', "3:1"),
        ("[1, ]", "1:5"),
        ('{"a": 1,}', "1:[89]"),  # Python 3.13 names the comma, earlier ones what follows it
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_what_is_wrong_in_a_list_is_named_by_line_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, place: str, chunk: int
) -> None:
    monkeypatch.setattr(bounded, "_CHUNK_BYTES", chunk)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(GymError, match=rf"a\.json:{place}: not valid JSON"):
        list(read_raw(find_files(tmp_path / "a.json")[0]))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt"])
def test_files_of_wide_characters_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, encoding: str, name: str
) -> None:
    file = tmp_path / name
    file.write_bytes('[{"text": "first"}, {"text": "é"}]'.encode(encoding))
    with pytest.raises(GymError, match=rf"{name} is UTF-(16|32)") as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID
    command = caught.value.hint.partition(": ")[2].split(" > ")[0].replace("FILE", str(file))
    assert (
        subprocess.run(command.split(), capture_output=True, check=True)
        .stdout.lstrip(b"\xef\xbb\xbf")
        .startswith(b"[{")
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.arrow", "an Arrow file"),
        ("stream.arrow", "an Arrow stream"),
        ("a.xlsx", "a ZIP archive or a workbook"),
        ("a.jsonl", "a gzip file without the suffix"),
        ("parquet", "a Parquet file without the suffix"),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_its_kind(tmp_path: Path, name: str, kind: str) -> None:
    file, table = tmp_path / name, pyarrow.table({"text": ["first", "second"]})
    if name == "stream.arrow":
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif name.endswith(".arrow"):
        feather.write_feather(table, file, compression="uncompressed")
    elif name == "parquet":
        parquet.write_table(table, file)
    elif name.endswith(".xlsx"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("xl/workbook.xml", "<workbook/>")
    else:
        file.write_bytes(gzip.compress(b'{"text": "first"}\n'))

    with pytest.raises(GymError, match=f"is {kind}") as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_text_of_one_byte_a_character_is_refused_with_the_byte_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(GymError, match="not UTF-8 at byte 28") as caught:
        load_rows(tmp_path / "a.jsonl")
    assert "in Excel: CSV UTF-8" in caught.value.hint
    assert "iconv -f WINDOWS-1252" in caught.value.hint


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        b'["a", "caf\xe9"]',
        b'["\xc3\xa9\xff"]',
        b'["\xf0\x9f\x98\xff"]',
        b'["\xc3", 1]',
        b'["\xe2\x82',
        b'\xef\xbb\xbf["\xe9"]',
    ],
    ids=[
        "one byte",
        "after a character",
        "within a character",
        "an incomplete character",
        "at the end",
        "after a byte order mark",
    ],
)
def test_the_byte_that_is_not_utf8_is_named_however_the_bytes_arrive(
    monkeypatch: pytest.MonkeyPatch, data: bytes, chunk: int
) -> None:
    monkeypatch.setattr(bounded, "_CHUNK_BYTES", chunk)
    with pytest.raises(UnicodeDecodeError) as expected:
        data.decode()
    reader = io.BufferedReader(bounded._Unbuffered(io.BytesIO(data)), 16)
    with pytest.raises(GymError) as caught:
        list(JsonItems("a.json", reader))
    assert caught.value.message == f"a.json: not UTF-8 at byte {expected.value.start}"


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "a\ud800", "completion": "b"}, "prompt"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "é \udfff"}]},
            "messages",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "\udc00"}, "rejected"),
        ({"text": "a\ud83d"}, "text"),
    ],
)
def test_half_a_character_is_refused_with_row_and_column(
    tmp_path: Path, row: dict[str, Any], key: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(
        GymError, match=rf"a\.jsonl:2: '{key}' has \\u[0-9a-f]{{4}} at character \d"
    ) as caught:
        load_rows(file)
    assert caught.value.code is ErrorCode.DATA_INVALID
    with pytest.raises(GymError, match=f"row 1: '{key}' has"):
        rows_of_run(TrainingConfig(algorithm="dpo" if "chosen" in row else "sft"), [row], None)


def test_a_whole_emoji_of_two_codes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert [dict(row) for row in load_rows(tmp_path / "a.jsonl")] == [{"text": "😀"}]
    assert as_kind([{"text": "😀"}], "supervised") == [{"text": "😀"}]
