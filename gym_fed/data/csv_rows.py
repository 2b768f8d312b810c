"""CSV rows without their empty cells, and detection of the delimiter (European Excel writes semicolons)."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from gym_fed.data.bounded import MAX_ROW_BYTES


class CsvRow(dict[str, Any]):
    """The non-empty cells of a row. Equal to a plain dict of them.

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
"""Bytes of a file that are read to detect its delimiter."""
_CANDIDATES = (",", ";", "\t", "|")
_NAMES = {",": "','", ";": "';'", "\t": "tabs", "|": "'|'"}


def delimiter_of(suffix: str, head: bytes | str) -> str:
    """Return the delimiter of a table.

    A delimiter fits if it splits the header and the first row into the same number of cells, at least two. The first
    of comma, semicolon, tab and ``|`` that fits is taken, and a comma where none does. ``csv.Sniffer`` is not used: it
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
