"""Readers that resume a data file at a mark, one per file type, for ``gym_fed.data.paging``."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.bounded import BOM, CsvRow, decoded, delimiter_name, json_line, not_utf8
from gym_fed.data.files import after_space, cell_value
from gym_fed.data.rows import without_filled_nulls

MAX_ROW_BYTES = 2**20
"""Maximum size in bytes of a row that is read completely; only the first characters of a larger row are read."""
MAX_WHOLE_BYTES = 64 * 2**20
"""Maximum size in bytes of files that are read as a whole: JSON lists and texts."""
HEAD_BYTES = 4096
STRIDE = 128
"""Number of rows between two stored marks."""

_Record = tuple[str, int, str, Callable[[], Any]]
"""A row's place, size in bytes, first characters if it is too large (otherwise empty), and a function that loads it."""


class PageLayout(ABC):
    """A reader for one file type; a mark is the state that it needs to resume at a row."""

    first: Any

    @abstractmethod
    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        """Yield rows from a mark, each with the mark of the next row."""


class LinesRows(PageLayout):
    """A file with one row per line; a mark is a byte and a line."""

    first = (0, 1)

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        offset, number = mark
        stream.seek(offset)
        while line := stream.readline(MAX_ROW_BYTES + 1):
            size = len(line)
            end = line.endswith(b"\n")
            while size > MAX_ROW_BYTES and not end and (more := stream.readline(MAX_ROW_BYTES)):
                size, end = size + len(more), more.endswith(b"\n")
            place, here = f"{self._name}:{number}", offset
            offset, number = offset + size, number + 1
            head = line[:HEAD_BYTES].decode("utf-8", "replace") if size > MAX_ROW_BYTES else ""
            if line.strip():
                yield (place, size, head, partial(_json_row, place, line, here)), (offset, number)


def _json_row(place: str, line: bytes, offset: int) -> Any:
    return json_line(place, decoded(place, line, offset))


class CsvRows(PageLayout):
    """A table with a header; a mark is a byte and a line, since quoted cells may contain line ends."""

    first = (0, 1)

    def __init__(self, name: str, delimiter: str) -> None:
        self._name, self._delimiter = name, delimiter
        self._header: list[str] = []

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        offset, number = mark
        stream.seek(offset)
        read = [offset, number]

        def lines() -> Iterator[str]:
            while line := stream.readline(MAX_ROW_BYTES + 1):
                read[0], read[1] = read[0] + len(line), read[1] + 1
                yield line.removeprefix(BOM).decode("utf-8")

        csv.field_size_limit(MAX_ROW_BYTES)
        reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
        while True:
            at, line = read
            try:
                if at == 0:
                    self._header = next(reader, [])
                    at, line = read
                cells = next(reader, None)
            except csv.Error as error:
                raise GymError(
                    ErrorCode.DATA_INVALID, f"{self._name}:{line}: not valid CSV: {error}", "quote the cell"
                ) from error
            except UnicodeDecodeError as error:
                raise not_utf8(f"{self._name}: not UTF-8 near line {line}") from error
            if cells is None:
                return
            if cells:
                place = f"{self._name}:{line}"
                yield (place, read[0] - at, "", self._row(place, cells)), tuple(read)

    def _row(self, place: str, cells: list[str]) -> Callable[[], Any]:
        header = self._header

        def load() -> Any:
            if len(cells) != len(header):
                more_or_fewer = "more" if len(cells) > len(header) else "fewer"
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{place}: {more_or_fewer} cells than the header has",
                    f"quote cells that contain {delimiter_name(self._delimiter)}",
                )
            filled = {
                key: cell_value(key, value) for key, value in zip(header, cells, strict=True) if value != ""
            }
            return CsvRow(filled, tuple(header))

        return load


class JsonListRows(PageLayout):
    """A JSON list; a mark is a character, a line and an item."""

    first = None

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        text = _whole(self._name, stream, "write it as .jsonl: gym data convert IN OUT.jsonl --to messages")
        decoder = json.JSONDecoder()
        at, counted, line, number = mark or (after_space(text, 0), 0, 1, 0)
        if mark is None:
            if text[at : at + 1] != "[":
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{self._name}: expected a list of rows",
                    "enclose the rows in [ ]",
                )
            at = after_space(text, at + 1)
        while text[at : at + 1] != "]":
            try:
                value, end = decoder.raw_decode(text, at)
                after = after_space(text, end)
                if text[after : after + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, after)
            except json.JSONDecodeError as error:
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{self._name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}",
                    "a .json file is one list of rows",
                ) from error
            except RecursionError as error:
                raise GymError(ErrorCode.DATA_INVALID, f"{self._name}: nested too deeply") from error
            except ValueError as error:  # such as a number of 5,000 digits
                raise GymError(ErrorCode.DATA_INVALID, f"{self._name}: {error}") from error
            line, counted, number = line + text.count("\n", counted, at), at, number + 1
            size = end - at
            head = text[at : at + HEAD_BYTES] if size > MAX_ROW_BYTES else ""
            record = (f"{self._name}:{line}: row {number}", size, head, partial(_same, value))
            at = after_space(text, after + 1) if text[after] == "," else after
            yield record, (at, counted, line, number)


class TextRows(PageLayout):
    """A text file as one row."""

    first = None

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        text = _whole(self._name, stream, "split it")
        head = text[:HEAD_BYTES] if len(text) > MAX_ROW_BYTES else ""
        yield (self._name, len(text), head, lambda: {"text": text}), None


class ParquetRows(PageLayout):
    """A Parquet file, read by row groups; a mark is a row number."""

    first = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def num_rows(self, path: Path) -> int:
        """Return the number of rows according to the file's footer."""
        import pyarrow
        from pyarrow import parquet

        try:
            return int(parquet.read_metadata(path).num_rows)
        except pyarrow.ArrowException as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID, f"{self._name}: not a readable Parquet file: {error}", "rewrite the file"
        )

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        import pyarrow
        from pyarrow import parquet

        number = 0
        try:
            file = parquet.ParquetFile(stream)
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if number + rows <= mark:
                    number += rows
                    continue
                for batch in file.iter_batches(batch_size=STRIDE, row_groups=[group]):
                    if number + batch.num_rows <= mark:
                        number += batch.num_rows
                        continue
                    size = batch.nbytes // max(1, batch.num_rows)
                    for row in batch.to_pylist(maps_as_pydicts="strict"):
                        number += 1
                        if number <= mark:
                            continue
                        value = without_filled_nulls(row)
                        yield (
                            (f"{self._name}: row {number}", size, _head_of(value), partial(_same, value)),
                            number,
                        )
        except (pyarrow.ArrowException, KeyError) as error:  # KeyError if a map has a key twice
            raise self._unreadable(error) from error


def _same(value: Any) -> Any:
    return value


def _head_of(row: dict[str, Any]) -> str:
    """Return the first characters of an oversized row."""
    size = sum(len(value) for value in row.values() if isinstance(value, str | bytes))
    return (
        str({key: str(value)[:200] for key, value in row.items()})[:HEAD_BYTES]
        if size > MAX_ROW_BYTES
        else ""
    )


def _whole(name: str, stream: BinaryIO, remedy: str) -> str:
    data = stream.read(MAX_WHOLE_BYTES + 1)
    if len(data) > MAX_WHOLE_BYTES:
        raise GymError(
            ErrorCode.TOO_LARGE,
            f"{name} has more than {MAX_WHOLE_BYTES >> 20} MiB, but such a file must fit in memory",
            remedy,
        )
    try:
        return data.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID, f"{name}: not UTF-8 at byte {error.start}", "save the file as UTF-8"
        ) from error
