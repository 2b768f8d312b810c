"""Rename the columns of a file to the names that formats expect: ``prompt=question,completion=answer``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.data.bounded import CsvRow, columns_of
from gym_fed.data.formats.base import BadRow, EmptyCell, Raw, as_object

_OPTIONAL = ("system", "input", "context", "history", "tools", "images", "image", "forget")
"""Columns that may be empty in a row."""
_SHOWN = 20
_SHOWN_CHARACTERS = 40


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse ``--columns``: the file's column names by the names that the format expects.

    Two spellings: ``ours=theirs`` pairs with a comma between them, and a JSON object for names that hold a comma or
    begin or end with a space.

    Raises:
        GymError: ``USAGE`` for anything else, and for a name that is given twice.
    """
    columns: dict[str, str] = {}
    for ours, theirs in _pairs(text or ""):
        if ours in columns or theirs in columns.values():
            twice = ours if ours in columns else theirs
            raise GymError(ErrorCode.USAGE, f"--columns: {twice!r} is named twice", "name each column once")
        columns[ours] = theirs
    return columns


def _pairs(text: str) -> list[tuple[str, str]]:
    if text.lstrip().startswith("{"):
        try:
            pairs = list(json.loads(text, object_pairs_hook=list))
        except (ValueError, TypeError, RecursionError):
            pairs = []
        if pairs and all(isinstance(word, str) and word for pair in pairs for word in pair):
            return [(str(ours), str(theirs)) for ours, theirs in pairs]
        raise GymError(
            ErrorCode.USAGE,
            f"--columns: {plain(text, _SHOWN_CHARACTERS)} is not a JSON object of names",
            """write '{"prompt": "question", "completion": "answer"}'""",
        )
    pairs = []
    for part in text.split(",") if text else ():
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not (ours and equals and theirs):
            raise GymError(
                ErrorCode.USAGE,
                f"--columns: {part!r} is not a pair of names",
                "write OURS=THEIRS with commas between, such as prompt=question,completion=answer; for a name with a "
                "comma, a JSON object",
            )
        pairs.append((ours, theirs))
    return pairs


def renaming(columns: Mapping[str, str]) -> Callable[[Any], Any] | None:
    """Return a function that renames the columns of a raw row; None if there is nothing to rename.

    The function raises ``BadRow`` for a column that the row does not have, and for an empty one that is needed.
    """
    if not columns:
        return None

    def rename(raw: Any) -> Raw:
        row = as_object(raw)
        known = columns_of(row)
        missing = [theirs for theirs in columns.values() if theirs not in known]
        if missing:
            names = [plain(str(key), _SHOWN_CHARACTERS) for key in known]
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise BadRow(
                f"has no column {missing[0]!r}",
                f"name one of its columns instead: {shown}" if shown else "drop the row: it is empty",
            )
        filled = {ours: theirs for ours, theirs in columns.items() if not _is_empty(row.get(theirs))}
        empty = [theirs for ours, theirs in columns.items() if ours not in filled and ours not in _OPTIONAL]
        if empty:
            raise EmptyCell(f"column {empty[0]!r}")
        rest = {key: value for key, value in row.items() if key not in columns.values()}
        header = (*(name for name in known if name not in columns.values()), *columns)
        return RenamedRow({**rest, **{ours: row[theirs] for ours, theirs in filled.items()}}, header, columns)

    return rename


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


class RenamedRow(CsvRow):
    """A raw row with renamed columns, which keeps the file's names for suggestions. Equal to a plain dict.

    Attributes:
        columns: The file's column names by our names.
    """

    def __init__(self, row: Mapping[str, Any], header: tuple[str, ...], columns: Mapping[str, str]) -> None:
        super().__init__(row, header)
        self.columns = columns
