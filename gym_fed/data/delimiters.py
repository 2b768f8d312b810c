"""Finds which character separates the columns of a CSV file: European Excel writes a semicolon."""

from __future__ import annotations

import csv
import io

from gym_fed.data.bounded import MAX_ROW_BYTES

HEAD_BYTES = 1 << 20
"""How much of a file is read to find its delimiter."""
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
    text = head if isinstance(head, str) else head[:HEAD_BYTES].decode("utf-8-sig", "replace")
    text = text[:HEAD_BYTES]
    return next((delimiter for delimiter in _CANDIDATES if _fits(text, delimiter)), ",")


def delimiter_name(delimiter: str) -> str:
    """Return what messages call a delimiter."""
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
