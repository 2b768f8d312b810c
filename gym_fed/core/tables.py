"""Tables in which every cell, heading and title is text: nothing that is shown in one is ever read as markup."""

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
    """A rich table for what others named and wrote.

    Args:
        columns: Headings, or columns.
        title: A line above the table.
        options: Those of ``rich.table.Table``.
    """

    def __init__(self, *columns: str | Column, title: str = "", **options: object) -> None:
        super().__init__(*columns, title_justify="left", **options)  # type: ignore[arg-type]
        if title:
            self.title = Text(plain(title, 1000))

    def add_row(self, *cells: RenderableType | None, style: object = None, end_section: bool = False) -> None:
        """A row; strings are shown as they are, on one line, and bounded."""
        shown = [Text(plain(cell, MAX_CELL)) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*shown, style=style, end_section=end_section)  # type: ignore[arg-type]


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Ids by their shortest beginnings, all of one length, that no two of them share."""
    unique = set(ids)
    length = _SHORT_ID
    while len({identifier[:length] for identifier in unique}) < len(unique):
        length += 1
    return {identifier: identifier[:length] for identifier in unique}
