"""Access the rows of a large file by number, without reading earlier parts twice.

A file is read from the nearest known mark; every 128th row has one. Marks are stored while rows are read, so that the
first page of a file with gigabytes costs no more than that of a small file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.data.bounded import BOM, DELIMITER_BYTES, delimiter_of
from gym_fed.data.files import SUFFIXES
from gym_fed.data.page_layouts import (
    HEAD_BYTES,
    MAX_ROW_BYTES,
    STRIDE,
    CsvRows,
    JsonListRows,
    LinesRows,
    PageLayout,
    ParquetRows,
    TextRows,
)

_COUNTED_BYTES = 2**20
"""Maximum size of files whose rows are counted, within milliseconds, instead of estimated."""


@dataclass(frozen=True)
class PagedRow:
    """A row in its file.

    Attributes:
        number: Index of the row, from 0.
        place: File and line, or the row number if the format has no lines.
        num_bytes: Size of the row in the file; 0 if unknown.
        head: First characters of a row that is too large to load; otherwise empty.
    """

    number: int
    place: str
    num_bytes: int
    head: str
    _load: Callable[[], Any] = field(repr=False)

    def load(self) -> Any:
        """Load the row's value.

        Raises:
            GymError: ``DATA_INVALID`` if it is not valid; ``TOO_LARGE``.
        """
        if self.head:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{self.place}: the row has {counted(self.num_bytes, 'byte')}",
                f"rows of up to {MAX_ROW_BYTES} bytes can be shown",
            )
        return self._load()


class PagedFile:
    """A local data file, plain or gzip-compressed.

    Args:
        path: A file whose suffix determines its format, as in ``gym_fed.data.files``.
        name: The file's name in places.

    Attributes:
        num_rows: Number of rows; known immediately for Parquet, and for other formats once the end has been read.
        rows_seen: Number of rows read so far.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``TOO_LARGE`` for a JSON list or text; ``DATA_INVALID``.
    """

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_file():
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no file {name}", "choose one from the list")
        self.path, self.name = path, name
        self.stamp = stamp_of(path)
        self.num_rows: int | None = None
        self.rows_seen = self._bytes_seen = 0
        self._layout = self._rows_layout()
        self._marks: list[Any] | range = [self._layout.first]
        if isinstance(self._layout, ParquetRows):
            self.num_rows = self._layout.num_rows(path)
            self._marks = range(0, self.num_rows + 1, STRIDE)

    def rows(self, start: int = 0) -> Iterator[PagedRow]:
        """Yield rows from the nearest known mark at or before row ``start``, so the caller can stop before reaching it.

        Raises:
            GymError: ``DATA_INVALID`` if the file cannot be read further.
        """
        block = min(start // STRIDE, len(self._marks) - 1)
        number = block * STRIDE
        try:
            with self.open() as stream:
                for record, mark in self._layout.read(stream, self._marks[block]):
                    yield PagedRow(number, *record)
                    number += 1
                    if number > self.rows_seen:
                        self.rows_seen, self._bytes_seen = number, self._bytes_seen + record[1]
                    if isinstance(self._marks, list) and number == STRIDE * len(self._marks):
                        self._marks.append(mark)
        except (EOFError, OSError, zlib.error) as error:
            raise self._unreadable(error) from error
        self.num_rows = number

    def about_rows(self) -> int | None:
        """Return the number of rows, estimated from the bytes read so far unless the file is small; None if unknown."""
        is_compressed = self.path.suffix.lower() == ".gz"
        if self.num_rows is None and self.stamp[1] <= _COUNTED_BYTES and not is_compressed:
            with suppress(GymError):  # an unreadable end is reported by the page that reaches it
                for _ in self.rows(self.rows_seen):
                    pass
        if self.num_rows is not None:
            return self.num_rows
        if not self._bytes_seen or is_compressed:
            return None
        return max(self.rows_seen, round(self.stamp[1] * self.rows_seen / self._bytes_seen))

    def open(self) -> BinaryIO:
        """Open the file, decompressing ``.gz``."""
        if self.path.suffix.lower() == ".gz":
            return cast(BinaryIO, gzip.open(self.path, "rb"))
        return self.path.open("rb")

    def _rows_layout(self) -> PageLayout:
        suffix = Path(self.path.name.lower().removesuffix(".gz")).suffix
        if suffix == ".parquet":
            return ParquetRows(self.name)
        if suffix in (".csv", ".tsv"):
            return CsvRows(self.name, delimiter_of(suffix, self._head(DELIMITER_BYTES)))
        if suffix == ".txt":
            return TextRows(self.name)
        if suffix == ".json" or self._head(HEAD_BYTES).removeprefix(BOM).lstrip()[:1] == b"[":
            return JsonListRows(self.name)
        return LinesRows(self.name)

    def _head(self, size: int) -> bytes:
        try:
            with self.open() as stream:
                return stream.read(size)
        except (EOFError, OSError, zlib.error) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID,
            f"{self.name} cannot be read: {error}",
            "restore the file, or remove it",
        )


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return modification time, size and inode, which change with the file."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def is_data_file(path: Path) -> bool:
    """Return True if a file contains rows according to its suffix; a ``.json`` file must begin with a list."""
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith(SUFFIXES) or name.endswith(".txt"):
        return False
    if not path.is_file():  # opening a named pipe would block until a writer opens it
        return False
    if not name.endswith(".json"):
        return True
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            return stream.read(64).removeprefix(BOM).lstrip()[:1] == b"["
    except (EOFError, OSError, zlib.error):
        return False
