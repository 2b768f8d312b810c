"""Read rows of JSON Lines (plain or gzip), JSON, CSV and Parquet files, bounded in size."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.data.csv_rows import delimiter_of

Row = dict[str, Any]

MAX_BYTES = 1 << 30
"""Maximum unpacked bytes of a file; the largest split of a suite has some tens of megabytes."""
MAX_ROWS = 2_000_000
"""Maximum rows of a Parquet file, where equal rows take almost no space; equal to a record's samples."""
_ROWS_AT_ONCE = 1024
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")


def read_rows(file: Path) -> list[Row]:
    """Read all rows of a file by its suffix; a JSON file contains a list, or one in its key ``examples``.

    Raises:
        GymError: ``DATA_INVALID`` for what cannot be read, with the line; ``TOO_LARGE``.
    """
    try:
        if file.name.endswith(".parquet"):
            return _parquet(file)
        if file.name.endswith(".csv"):
            return _csv(_text(file))
        if file.name.endswith(".json"):
            return _json(file)
        return list(_lines(file))
    except GymError:
        raise
    except (OSError, ValueError, EOFError, RecursionError, csv.Error) as error:
        raise _refused(file, str(error)) from error


def rows_bytes(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode rows as JSON Lines, independent of their source format."""
    return "".join(
        json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n" for row in rows
    ).encode("utf-8", "surrogatepass")


def rows_sha256(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of rows in their order."""
    return hashlib.sha256(rows_bytes(rows)).hexdigest()


def _text(file: Path) -> str:
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _too_large(file)
    return data.decode("utf-8-sig")


def _lines(file: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _refused(file, f"line {number}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise _refused(file, f"line {number}: no JSON object")
        yield row


def _json(file: Path) -> list[Row]:
    document = json.loads(_text(file))
    rows = document.get("examples") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _refused(file, "holds no list of objects, nor one under the key examples")
    return rows


def _csv(text: str) -> list[Row]:
    """Read CSV rows by header; without one (four answers and a letter, as in MMLU) columns are ``0``, ``1``, ..."""
    lines = list(
        csv.reader(text.splitlines(keepends=True), delimiter=delimiter_of(".csv", text), strict=True)
    )
    if not lines:
        return []
    head, body = lines[0], lines[1:]
    if len(head) == 6 and head[5] in ("A", "B", "C", "D"):
        head, body = [str(number) for number in range(6)], lines
    for number, line in enumerate(body, start=2):
        if len(line) != len(head):
            raise ValueError(f"row {number}: {len(line)} columns instead of {len(head)}")
    return [dict(zip(head, line, strict=True)) for line in body]


def _parquet(file: Path) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            groups = range(opened.metadata.num_row_groups)
            stated = sum(opened.metadata.row_group(group).total_byte_size for group in groups)
            if stated > MAX_BYTES:
                raise _too_large(file)
            # A value shared by many rows is stored once in the file, but once per row in memory.
            at_once = max(1, min(_ROWS_AT_ONCE, MAX_BYTES // max(1, stated)))
            rows: list[Row] = []
            num_bytes = 0
            for batch in opened.iter_batches(at_once):
                if len(rows) + batch.num_rows > MAX_ROWS:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"{file}: more than {MAX_ROWS} rows",
                        "give the file of one split",
                    )
                batch_rows: list[Row] = batch.to_pylist()
                num_bytes += sum(len(str(row)) for row in batch_rows)
                if num_bytes > MAX_BYTES:
                    raise _too_large(file)
                rows += batch_rows
            return rows
    except pyarrow.ArrowException as error:
        raise _refused(file, f"no Parquet file: {error}") from error


def _refused(file: Path, why: str) -> GymError:
    return GymError(ErrorCode.DATA_INVALID, f"{file}: {plain(why, 200)}", "fetch it again, or correct it")


def _too_large(file: Path) -> GymError:
    return GymError(ErrorCode.TOO_LARGE, f"{file}: more than {MAX_BYTES} bytes", "give the file of one split")
