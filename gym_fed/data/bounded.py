"""Read lines, JSON lists and CSV rows from a stream in bounded memory; oversized rows are refused before they are
loaded.

A compressed file of a few megabytes may expand to gigabytes, so the size of a file does not bound its rows.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError

MAX_ROW_BYTES = 64 * 2**20
"""Maximum size in bytes of a line, list item, cell or text."""
BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_BLANK = " \t\n\r"
_IN_NUMBERS = "0123456789.eE+-"
_NEAR_END = 16
"""Maximum distance from the end of the text at which an error may be due to an incomplete token, such as
``\\ud83d\\ude0``."""
_WIDE = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_BINARY = (
    (b"ARROW1", "an Arrow file"),
    (b"\xff\xff\xff\xff", "an Arrow stream"),
    (b"PAR1", "a Parquet file without the suffix .parquet"),
    (b"PK\x03\x04", "a ZIP archive or a workbook"),
    (b"\x1f\x8b", "a gzip file without the suffix .gz"),
    (b"SQLite format 3", "an SQLite database"),
    (b"%PDF", "a PDF"),
)
_HEAD_BYTES = 256


class _Unbuffered(io.RawIOBase):
    """A raw stream for ``io.BufferedReader`` over an object that has only ``read``."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def buffered(name: str, stream: BinaryIO) -> io.BufferedReader:
    """Wrap a text stream so that its lines can be read up to a maximum length.

    Raises:
        GymError: ``DATA_INVALID`` for UTF-16, UTF-32 and files that are not text.
    """
    reader: io.BufferedReader = io.BufferedReader(_Unbuffered(stream), _CHUNK_BYTES)
    head = reader.peek(_HEAD_BYTES)[:_HEAD_BYTES]
    if (binary := next((kind for mark, kind in _BINARY if head.startswith(mark)), None)) is not None:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{name} is {binary}, not text",
            "save the rows as .parquet, .jsonl, .json, .csv or .txt",
        )
    wide_encoding = next((encoding for mark, encoding in _WIDE if head.startswith(mark)), None)
    if wide_encoding is None and head.count(0) > len(head) // 4:  # ASCII text in UTF-16
        wide_encoding = "UTF-16LE" if head[1:2] == b"\0" else "UTF-16BE"
    if wide_encoding is not None:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{name} is {wide_encoding}, but must be UTF-8",
            f"convert it: iconv -f {wide_encoding} -t UTF-8 FILE > NEW",
        )
    return reader


def bounded_lines(name: str, reader: io.BufferedReader) -> Iterator[bytes]:
    """Yield lines with their line ends.

    Raises:
        GymError: ``DATA_INVALID`` naming the line that is longer than ``MAX_ROW_BYTES``.
    """
    number = 0
    while line := reader.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise too_long(f"{name}:{number}: the line")
        yield line


def bounded_whole(name: str, reader: io.BufferedReader) -> bytes:
    """Read a whole file as one row.

    Raises:
        GymError: ``DATA_INVALID`` if it is larger than ``MAX_ROW_BYTES``.
    """
    data = reader.read(MAX_ROW_BYTES + 1)
    if len(data) > MAX_ROW_BYTES:
        raise too_long(f"{name}: the text", "split it into files, or write .jsonl with one row per paragraph")
    return data


def too_long(
    what: str, remedy: str = "shorten or drop the row; a list of rows belongs in a .json file"
) -> GymError:
    """Return the error for a row that is too long."""
    return GymError(ErrorCode.DATA_INVALID, f"{what} is longer than {MAX_ROW_BYTES >> 20} MiB", remedy)


class JsonItems:
    """The items of a JSON list, parsed while it is read.

    Args:
        name: The file's name in messages.
        reader: A reader at the start of the list.
    """

    def __init__(self, name: str, reader: io.BufferedReader) -> None:
        self._name, self._reader = name, reader
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._parser = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False
        self._counted, self._line, self._column, self._bytes = 0, 1, 1, 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield each item with the line on which it begins.

        Raises:
            GymError: ``DATA_INVALID`` for bytes that are not UTF-8, a value that is not a list, and an item that is too
                long.
            JSONDecodeError: For invalid JSON, with line and column in the file.
        """
        if self._next() != "[":
            self._item(1)  # this reports invalid JSON
            raise GymError(
                ErrorCode.DATA_INVALID, f"{self._name}: expected a list of rows", "enclose the rows in [ ]"
            )
        self._at += 1
        number = 0
        while (character := self._next()) != "]" or number:
            number += 1
            self._count_lines()
            yield self._line, self._item(number)
            character = self._next()
            if character == "]":
                break
            if character != ",":
                raise self._error("Expecting ',' delimiter", self._at)
            self._at += 1
            self._next()
        self._at += 1
        if self._next():
            raise self._error("Extra data", self._at)

    def _item(self, number: int) -> Any:
        """Parse the value at the front of the text, reading more while it may be incomplete."""
        step = _CHUNK_BYTES
        while True:
            try:
                value, end = self._parser.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                partial = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _NEAR_END
                if self._ended or not partial:
                    raise self._error(error.msg, error.pos) from error
            else:
                behind = self._text[end : end + 1]
                if self._ended or (behind and behind not in _IN_NUMBERS):  # "1" may be the start of "1.5"
                    self._at = end
                    return value
            self._drop()
            if len(self._text) > MAX_ROW_BYTES:
                raise too_long(f"{self._name}:{self._line}: row {number}", "shorten or drop the row")
            self._read(min(step, MAX_ROW_BYTES + 1 - len(self._text)))
            step *= 2  # a long item is parsed again after each read, so limit the number of reads

    def _next(self) -> str:
        """Peek at the next character that is not whitespace; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._drop()
            self._read(_CHUNK_BYTES)

    def _drop(self) -> None:
        """Drop the text before the current position."""
        self._count_lines()
        self._text, self._at, self._counted = self._text[self._at :], 0, 0

    def _count_lines(self) -> None:
        self._line, self._column = self._place(self._at)
        self._counted = self._at

    def _read(self, size: int) -> None:
        data = self._reader.read(size)
        self._ended = not data
        try:
            self._text += self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            # The decoded text ends with data, and begins after a byte order mark or with an incomplete character.
            at = self._bytes + len(data) - len(error.object) + error.start
            raise not_utf8(f"{self._name}: not UTF-8 at byte {at}") from error
        self._bytes += len(data)

    def _place(self, at: int) -> tuple[int, int]:
        """Return the line and column of a position, which must not precede the last one."""
        lines = self._text.count("\n", self._counted, at)
        if lines:
            return self._line + lines, at - self._text.rindex("\n", self._counted, at)
        return self._line, self._column + at - self._counted

    def _error(self, problem: str, at: int) -> json.JSONDecodeError:
        error = json.JSONDecodeError(problem, "", 0)
        error.lineno, error.colno = self._place(at)
        return error


def not_utf8(problem: str) -> GymError:
    """Return the error for bytes that are not UTF-8."""
    remedy = (
        "save the file as UTF-8 (in Excel: CSV UTF-8); for text from older Windows programs: "
        "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
    )
    return GymError(ErrorCode.DATA_INVALID, problem, remedy)


def decoded(name: str, data: bytes, start: int = 0) -> str:
    """Decode bytes of a file that begin at ``start``, without a byte order mark."""
    try:
        return (data.removeprefix(BOM) if start == 0 else data).decode("utf-8")
    except UnicodeDecodeError as error:
        skipped = len(BOM) if start == 0 and data.startswith(BOM) else 0
        raise not_utf8(f"{name}: not UTF-8 at byte {start + skipped + error.start}") from error


def json_line(place: str, line: str) -> Any:
    """Parse a line of JSON.

    Raises:
        GymError: ``DATA_INVALID`` naming the place.
    """
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{place}: not valid JSON: {error.msg} at column {error.colno}",
            "each line of a .jsonl file is one JSON object",
        ) from error
    except RecursionError as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{place}: nested too deeply", "drop the row") from error
    except ValueError as error:  # such as a number of 5,000 digits
        raise GymError(ErrorCode.DATA_INVALID, f"{place}: {error}", "drop the row") from error


class CsvRow(dict[str, Any]):
    """The non-empty cells of a CSV row; equal to a plain dict of them.

    Attributes:
        header: All columns of the file.
    """

    def __init__(self, cells: Mapping[str, Any], header: tuple[str, ...]) -> None:
        super().__init__(cells)
        self.header = header


def columns_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a row's columns, including those of empty CSV cells."""
    return row.header if isinstance(row, CsvRow) else tuple(row)


DELIMITER_BYTES = 1 << 20
"""Maximum number of bytes to read from a file to detect its delimiter."""
_CANDIDATES = (",", ";", "\t", "|")
_NAMES = {",": "','", ";": "';'", "\t": "tabs", "|": "'|'"}


def delimiter_of(suffix: str, head: bytes | str) -> str:
    """Return the delimiter of a table.

    A delimiter fits if it splits the header and the first row into the same number of cells, at least two. The first
    of comma, semicolon, tab and ``|`` that fits is used, else a comma. ``csv.Sniffer`` is not used: it
    also counts characters within texts.

    Args:
        suffix: ``.tsv`` files are always separated by tabs.
        head: The beginning of the file, without a byte order mark if it is text.
    """
    if suffix == ".tsv":
        return "\t"
    text = head if isinstance(head, str) else head[:DELIMITER_BYTES].decode("utf-8-sig", "replace")
    text = text[:DELIMITER_BYTES]
    return next((delimiter for delimiter in _CANDIDATES if _fits(text, delimiter)), ",")


def delimiter_name(delimiter: str) -> str:
    """Return the name of a delimiter for messages."""
    return _NAMES[delimiter]


def _fits(text: str, delimiter: str) -> bool:
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        if len(header) < 2:
            return False
        return len(header) == len(next((row for row in reader if row), []))
    except csv.Error:
        return False
