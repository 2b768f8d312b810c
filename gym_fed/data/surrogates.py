"""Finds halves of surrogate pairs in rows: JSON can write them (``\\ud800``), but they are no text to a tokenizer."""

from __future__ import annotations

import re
from typing import Any

SURROGATE_REMEDY = "write the whole character (an emoji is two such codes in JSON), or drop the row"
_SURROGATE = re.compile("[\ud800-\udfff]")


def surrogate_in(row: dict[str, Any]) -> str | None:
    """Return what is wrong with the first text that holds half a surrogate pair; None where no text does."""
    for key, value in row.items():
        if (found := _found(key)) is None:
            found = _found(value)
        if found is not None:
            code, at = found
            return f"{key!a} holds \\u{code:04x} at character {at}, which is half a character"
    return None


def _found(value: Any) -> tuple[int, int] | None:
    """The code and its place in its text."""
    if isinstance(value, str):
        match = None if value.isascii() else _SURROGATE.search(value)
        return None if match is None else (ord(match[0]), match.start())
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        return next((found for part in value if (found := _found(part)) is not None), None)
    return None
