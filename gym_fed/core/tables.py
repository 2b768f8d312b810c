"""Rich tables in which cells, headings and titles are plain text, never markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from gym_fed.core.text import plain

MAX_CELL = 200
"""Characters of one cell."""

_SHORT_ID = 9
"""Characters that an id keeps at least."""


class TextTable(Table):
    """A rich table for untrusted text.

    Args:
        columns: Headings or columns.
        title: Line above the table.
        options: Keyword arguments of ``rich.table.Table``.
    """

    def __init__(self, *columns: str | Column, title: str = "", **options: object) -> None:
        super().__init__(*columns, title_justify="left", **options)  # type: ignore[arg-type]
        if title:
            self.title = Text(plain(title, 1000))

    def add_row(self, *cells: RenderableType | None, style: object = None, end_section: bool = False) -> None:
        """Add a row; strings are shown literally, on one line, and truncated."""
        shown = [Text(plain(cell, MAX_CELL)) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*shown, style=style, end_section=end_section)  # type: ignore[arg-type]


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Map ids to their shortest distinct prefixes, all of the same length."""
    unique = set(ids)
    length = _SHORT_ID
    while len({identifier[:length] for identifier in unique}) < len(unique):
        length += 1
    return {identifier: identifier[:length] for identifier in unique}
