"""A row of a CSV file: empty cells are absent from it, but its columns are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CsvRow(dict[str, Any]):
    """The cells of a row that hold something. Equal to a plain dict of them.

    Attributes:
        header: All columns of the file.
    """

    def __init__(self, cells: Mapping[str, Any], header: tuple[str, ...]) -> None:
        super().__init__(cells)
        self.header = header


def columns_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a row's columns, those of a CSV file's empty cells included."""
    return row.header if isinstance(row, CsvRow) else tuple(row)
