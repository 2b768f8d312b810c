"""Rows of a large file by their number, without reading what lies before them twice.

A file is read from the nearest place that is known, every 128th row's. Places become known as rows are read, so that
the first page of a file of gigabytes costs no more than that of a small one.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from gym_fed.data.files import after_space, cell_value
from gym_fed.data.locations import SUFFIXES
from gym_fed.errors import ErrorCode, GymError

MAX_ROW_BYTES = 2**20
"""Of a larger row, only the first characters are read."""
MAX_WHOLE_BYTES = 64 * 2**20
"""A list of JSON, and a text, are read whole."""
HEAD_BYTES = 4096
_STRIDE = 128
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PagedRow:
    """One row as it stands in its file.

    Attributes:
        number: Counted from 0.
        place: File and line, or row where there are no lines.
        num_bytes: Of its text in the file; 0 where that is not known.
        head: Its first characters, where it is too large to be loaded; else empty.
    """

    number: int
    place: str
    num_bytes: int
    head: str
    _load: Callable[[], Any] = field(repr=False)

    def load(self) -> Any:
        """Its value.

        Raises:
            GymError: ``DATA_INVALID`` where it is not valid; ``TOO_LARGE``.
        """
        if self.head:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{self.place}: the row has {self.num_bytes} bytes",
                f"rows of up to {MAX_ROW_BYTES} bytes are read here",
            )
        return self._load()


class PagedFile:
    """A data file on this machine, packed with gzip or not.

    Args:
        path: Its suffix decides how it is read, as in ``gym_fed.data.files``.
        name: How places call it.

    Attributes:
        num_rows: Known once the end has been read; at once for Parquet.
        rows_seen: How far the file has been read.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``TOO_LARGE`` for what is read whole; ``DATA_INVALID``.
    """

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_file():
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no file {name}", "choose one of the list")
        self.path, self.name = path, name
        self.stamp = stamp_of(path)
        self.num_rows: int | None = None
        self.rows_seen = self._bytes_seen = 0
        self._layout = self._layout_of()
        self._marks: list[Any] | range = [self._layout.first]
        if isinstance(self._layout, _Parquet):
            self.num_rows = self._layout.num_rows(path)
            self._marks = range(0, self.num_rows + 1, _STRIDE)

    def rows(self, start: int = 0) -> Iterator[PagedRow]:
        """Rows from the nearest known place before row ``start``, so that a caller can stop on the way to it.

        Raises:
            GymError: ``DATA_INVALID`` where the file cannot be read further.
        """
        block = min(start // _STRIDE, len(self._marks) - 1)
        number = block * _STRIDE
        try:
            with self.open() as stream:
                for record, mark in self._layout.read(stream, self._marks[block]):
                    yield PagedRow(number, *record)
                    number += 1
                    if number > self.rows_seen:
                        self.rows_seen, self._bytes_seen = number, self._bytes_seen + record[1]
                    if isinstance(self._marks, list) and number == _STRIDE * len(self._marks):
                        self._marks.append(mark)
        except (EOFError, OSError, zlib.error) as error:
            raise self._unreadable(error) from error
        self.num_rows = number

    def about_rows(self) -> int | None:
        """How many rows there are, by the bytes of those seen; None where nothing can be said."""
        if self.num_rows is not None:
            return self.num_rows
        if not self._bytes_seen or self.path.suffix.lower() == ".gz":
            return None
        return max(self.rows_seen, round(self.stamp[1] * self.rows_seen / self._bytes_seen))

    def open(self) -> BinaryIO:
        """Its bytes, unpacked."""
        if self.path.suffix.lower() == ".gz":
            return cast(BinaryIO, gzip.open(self.path, "rb"))
        return self.path.open("rb")

    def _layout_of(self) -> _Layout:
        suffix = Path(self.path.name.lower().removesuffix(".gz")).suffix
        if suffix == ".parquet":
            return _Parquet(self.name)
        if suffix in (".csv", ".tsv"):
            return _Csv(self.name, "\t" if suffix == ".tsv" else ",")
        if suffix == ".txt":
            return _Text(self.name)
        if suffix == ".json" or self._begins_a_list():
            return _JsonList(self.name)
        return _Lines(self.name)

    def _begins_a_list(self) -> bool:
        try:
            with self.open() as stream:
                return stream.read(HEAD_BYTES).removeprefix(_BOM).lstrip()[:1] == b"["
        except (EOFError, OSError, zlib.error) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID,
            f"{self.name}: cannot be read: {error}",
            "restore the file, or leave it out",
        )


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Changes when a file does: time, size and number of the file."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_data_file(path: Path) -> bool:
    """Whether a file is one of rows, by its suffix; a ``.json`` file has to begin with a list."""
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(SUFFIXES) or name.endswith(".txt"):
        return False
    if not name.endswith(".json"):
        return True
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            return stream.read(64).removeprefix(_BOM).lstrip()[:1] == b"["
    except (EOFError, OSError, zlib.error):
        return False


_Record = tuple[str, int, str, Callable[[], Any]]
"""Place, bytes, head where it is too large, and what loads it."""


class _Layout(ABC):
    """How a kind of file is read; a mark is whatever it needs to begin at a row."""

    first: Any

    @abstractmethod
    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        """Rows from a mark on, each with the mark of the next."""


class _Lines(_Layout):
    """A row a line; a mark is byte and line."""

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
                yield (place, size, head, _json_line(place, line, here)), (offset, number)


def _json_line(place: str, line: bytes, offset: int) -> Callable[[], Any]:
    def load() -> Any:
        try:
            return json.loads((line.removeprefix(_BOM) if offset == 0 else line).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: not UTF-8 at byte {offset + error.start}",
                "save it as UTF-8",
            ) from error
        except json.JSONDecodeError as error:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"{place}: not valid JSON: {error.msg} at column {error.colno}",
                "each line of a .jsonl file is one JSON object",
            ) from error
        except (RecursionError, ValueError) as error:
            raise GymError(ErrorCode.DATA_INVALID, f"{place}: not valid JSON: {error}") from error

    return load


class _Csv(_Layout):
    """Rows under a header; a mark is byte and line, since a quoted cell may hold line ends."""

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
                yield line.removeprefix(_BOM).decode("utf-8")

        csv.field_size_limit(MAX_ROW_BYTES)
        reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
        if offset == 0:
            self._header = next(reader, [])
        while True:
            at, line = read
            try:
                cells = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise GymError(
                    ErrorCode.DATA_INVALID, f"{self._name}:{line}: not valid CSV: {error}", "quote the cell"
                ) from error
            if cells is None:
                return
            if cells:
                place = f"{self._name}:{line}"
                yield (place, read[0] - at, "", self._row(place, cells)), tuple(read)

    def _row(self, place: str, cells: list[str]) -> Callable[[], Any]:
        header = self._header

        def load() -> Any:
            if len(cells) != len(header):
                found = "more" if len(cells) > len(header) else "fewer"
                raise GymError(
                    ErrorCode.DATA_INVALID,
                    f"{place}: {found} cells than the header has",
                    "quote cells with commas",
                )
            return {
                key: cell_value(key, value) for key, value in zip(header, cells, strict=True) if value != ""
            }

        return load


class _JsonList(_Layout):
    """Items of one list; a mark is character, line and item."""

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
                    ErrorCode.DATA_INVALID, f"{self._name}: expected a list of rows", "put the rows in [ ]"
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
            line, counted, number = line + text.count("\n", counted, at), at, number + 1
            size = end - at
            head = text[at : at + HEAD_BYTES] if size > MAX_ROW_BYTES else ""
            record = (f"{self._name}:{line}: row {number}", size, head, partial(_same, value))
            at = after_space(text, after + 1) if text[after] == "," else after
            yield record, (at, counted, line, number)


class _Text(_Layout):
    """A text is one row."""

    first = None

    def __init__(self, name: str) -> None:
        self._name = name

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        text = _whole(self._name, stream, "split it")
        head = text[:HEAD_BYTES] if len(text) > MAX_ROW_BYTES else ""
        yield (self._name, len(text), head, lambda: {"text": text}), None


class _Parquet(_Layout):
    """Columns in groups of rows; a mark is the row's number."""

    first = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def num_rows(self, path: Path) -> int:
        """As the file says at its end."""
        import pyarrow
        from pyarrow import parquet

        try:
            return int(parquet.read_metadata(path).num_rows)
        except pyarrow.ArrowException as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID, f"{self._name}: not a readable Parquet file: {error}", "write it again"
        )

    def read(self, stream: BinaryIO, mark: Any) -> Iterator[tuple[_Record, Any]]:
        import pyarrow
        from pyarrow import parquet

        number = 0
        try:
            found = parquet.ParquetFile(stream)
            for group in range(found.num_row_groups):
                rows = found.metadata.row_group(group).num_rows
                if number + rows <= mark:
                    number += rows
                    continue
                for batch in found.iter_batches(batch_size=_STRIDE, row_groups=[group]):
                    if number + batch.num_rows <= mark:
                        number += batch.num_rows
                        continue
                    size = batch.nbytes // max(1, batch.num_rows)
                    for row in batch.to_pylist():
                        number += 1
                        if number <= mark:
                            continue
                        value = {key: value for key, value in row.items() if value is not None}
                        yield (
                            (
                                f"{self._name}: row {number}",
                                size,
                                _head_of(value),
                                partial(_same, value),
                            ),
                            number,
                        )
        except pyarrow.ArrowException as error:
            raise self._unreadable(error) from error


def _same(value: Any) -> Any:
    return value


def _head_of(row: dict[str, Any]) -> str:
    """The first characters of a row that is too large."""
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
            f"{name}: has more than {MAX_WHOLE_BYTES >> 20} MiB, and such a file is read whole",
            remedy,
        )
    try:
        return data.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID, f"{name}: not UTF-8 at byte {error.start}", "save the file as UTF-8"
        ) from error
