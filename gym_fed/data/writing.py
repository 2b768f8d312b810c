"""Write rows to JSONL, JSON, CSV and Parquet files atomically, converting them if nothing is lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file
from gym_fed.core.registries import FORMATS
from gym_fed.data.files import JSON_CELLS, cell_value
from gym_fed.data.formats.base import BadRow, Format
from gym_fed.data.rows import Row, as_kind, kind_of, without_filled_nulls

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz")
_BATCH_ROWS = 10_000


def check_output(file: Path, overwrite: bool) -> None:
    """Refuse an existing file or an unsupported suffix before anything is read.

    Raises:
        GymError: ``FILE_EXISTS`` or ``USAGE``.
    """
    if "://" in str(file) or _suffix(file) not in SUFFIXES:
        raise GymError(
            ErrorCode.USAGE,
            f"{file}: cannot write this type of file",
            f"use a local path ending in {', '.join(SUFFIXES)}",
        )
    if file.is_dir() or (file.exists() and not overwrite):
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{file} already exists", "choose another name, or pass --overwrite"
        )


def write_rows(file: Path, rows: Iterable[Row], *, overwrite: bool = False) -> int:
    """Write rows as they arrive and return their number; ``file`` is created only after the last row is written.

    Raises:
        GymError: ``FILE_EXISTS``; ``USAGE`` for an unsupported suffix; ``DATA_INVALID`` for rows that the file format
            cannot represent.
    """
    check_output(file, overwrite)
    suffix = _suffix(file)
    count = 0

    def counted() -> Iterator[Row]:
        nonlocal count
        for row in rows:
            count += 1
            yield row

    with atomic_file(file) as stream:
        if suffix == ".jsonl.gz":
            # No name or time in the gzip header, so that equal rows give equal bytes.
            with gzip.GzipFile(filename="", fileobj=stream, mode="wb", mtime=0) as packed:
                _write_jsonl(packed, counted())  # type: ignore[arg-type]  # it writes bytes as a file does
        else:
            _WRITERS[suffix](stream, counted())
    return count


def convert_row(row: Row, format: str, *, allow_loss: bool = False) -> list[Row]:
    """Convert a row to ``format``. Reading the result must restore the row, unless losses are allowed.

    Args:
        row: A row of ``gym_fed.data.rows``.
        format: A name in ``gym_fed.core.registries.FORMATS``.
        allow_loss: True to also convert pairs to judgements or to the chosen conversation.

    Raises:
        BadRow: If anything would be lost; the message names it.
    """
    into: Format = FORMATS.type_of(format)()
    kind = into.kind
    actual = kind_of(row)
    if actual != kind and not allow_loss and not (actual == "supervised" and kind == "prompt"):
        raise BadRow(
            f"is a {actual} row, but {format} stores {kind} rows",
            "choose another format, or pass --allow-loss",
        )
    try:
        alike = as_kind([row], kind)
    except GymError as error:
        raise BadRow(error.message.removeprefix("row 1 "), error.hint) from error
    if actual == "supervised" and kind == "prompt" and (lost := _extra_answer_keys(row)):
        raise BadRow(f"{format} would lose {lost} of its answer", "choose messages, which stores everything")
    written = []
    for converted_row in alike:
        raw = into.write(converted_row)
        if (restored := into.read(raw)) != converted_row:
            lost = ", ".join(_lost(converted_row, restored)) or "a part of it"
            raise BadRow(f"{format} would lose {lost}", "choose messages, which stores everything")
        written.append(raw)
    return written


def _extra_answer_keys(row: Row) -> str:
    """Return the keys of the last message that would be lost in a prompt row's ``answer``."""
    last = row["messages"][-1] if "messages" in row else {}
    return ", ".join(repr(key) for key in last if key not in ("role", "content"))


def _lost(row: Row, restored: Row) -> Iterator[str]:
    """Yield the names of the keys of ``row`` whose values differ in ``restored``."""
    for key, value in row.items():
        other = restored.get(key)
        if other == value:
            continue
        if key == "messages" and other and len(other) == len(value):
            for number, (before, after) in enumerate(zip(value, other, strict=True), 1):
                yield from (f"{k!r} of message {number}" for k in before if before[k] != after.get(k))
        else:
            yield repr(key)


def _suffix(file: Path) -> str:
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def _json(row: Row) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except TypeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID, f"a row cannot be written as JSON: {error}", "write Parquet instead"
        ) from error


def _write_jsonl(stream: BinaryIO, rows: Iterable[Row]) -> None:
    for row in rows:
        stream.write(_json(row) + b"\n")


def _write_json(stream: BinaryIO, rows: Iterable[Row]) -> None:
    stream.write(b"[")
    for index, row in enumerate(rows):
        stream.write((b",\n" if index else b"\n") + _json(row))
    stream.write(b"\n]\n")


def _write_csv(stream: BinaryIO, rows: Iterable[Row]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
    writer: Any = None
    for number, row in enumerate(rows, 1):
        if writer is None:
            writer = csv.DictWriter(text, list(row))
            writer.writeheader()
        if set(row) != set(writer.fieldnames):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"row {number} has different columns from row 1",
                "write JSONL instead",
            )
        writer.writerow({key: _cell(key, value, number) for key, value in row.items()})
    text.detach()


def _cell(key: str, value: Any, number: int) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and key in JSON_CELLS and cell_value(key, value) != value:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"row {number}: {key!r} is text that CSV would read as JSON",
            "write JSONL instead",
        )
    return value


def _write_parquet(stream: BinaryIO, rows: Iterable[Row]) -> None:
    import pyarrow
    from pyarrow import parquet

    source, writer, number = iter(rows), None, 0
    try:
        while batch := list(islice(source, _BATCH_ROWS)):
            # pyarrow takes the columns from the first row, so every row gets all of them.
            names = dict.fromkeys(name for row in batch for name in row)
            padded = [{name: row.get(name) for name in names} for row in batch]
            table = pyarrow.Table.from_pylist(padded, schema=None if writer is None else writer.schema)
            if not set(names) <= set(table.column_names) or without_filled_nulls(table.to_pylist()) != batch:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"rows {number + 1} to {number + len(batch)} have nulls, or keys that earlier rows lack, which "
                    "Parquet would drop",
                    "write JSONL instead",
                )
            number += len(batch)
            if writer is None:
                writer = parquet.ParquetWriter(stream, table.schema)
            writer.write_table(table)
    except pyarrow.ArrowException as error:
        raise GymError(
            ErrorCode.DATA_INVALID, f"the rows do not fit one Parquet schema: {error}", "write JSONL instead"
        ) from error
    finally:
        if writer is not None:
            writer.close()


_WRITERS: dict[str, Callable[[BinaryIO, Iterable[Row]], None]] = {
    ".jsonl": _write_jsonl,
    ".json": _write_json,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
