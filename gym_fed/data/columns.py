"""Columns of a file under the names that formats know: ``prompt=question,completion=answer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gym_fed.data.formats.base import BadRow, Raw, as_object
from gym_fed.errors import ErrorCode, GymError
from gym_fed.text import plain

_SHOWN = 20
_SHOWN_CHARACTERS = 40


def parse_columns(text: str | None) -> dict[str, str]:
    """The value of ``--columns``: names of the file's columns, by the names that the format expects.

    Raises:
        GymError: ``USAGE`` for anything but ``ours=theirs`` pairs with a comma between them, each name once.
    """
    columns: dict[str, str] = {}
    for part in text.split(",") if text else ():
        ours, equals, theirs = (word.strip() for word in part.partition("="))
        if not (ours and equals and theirs):
            raise GymError(
                ErrorCode.USAGE,
                f"--columns: {part!r} is no pair of names",
                "write OURS=THEIRS with commas between, such as prompt=question,completion=answer",
            )
        if ours in columns or theirs in columns.values():
            twice = ours if ours in columns else theirs
            raise GymError(ErrorCode.USAGE, f"--columns: {twice!r} is named twice", "name each column once")
        columns[ours] = theirs
    return columns


def renaming(columns: Mapping[str, str]) -> Callable[[Any], Any] | None:
    """What renames a raw row; None where there is nothing to rename.

    It raises ``BadRow`` with the row's columns where one of ``columns`` is none of them.
    """
    if not columns:
        return None

    def rename(raw: Any) -> Raw:
        row = as_object(raw)
        missing = [theirs for theirs in columns.values() if theirs not in row]
        if missing:
            names = [plain(str(key), _SHOWN_CHARACTERS) for key in row]
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            raise BadRow(
                f"has no column {missing[0]!r}", f"columns names it, and the row has {shown or 'no columns'}"
            )
        rest = {key: value for key, value in row.items() if key not in columns.values()}
        return {**rest, **{ours: row[theirs] for ours, theirs in columns.items()}}

    return rename
