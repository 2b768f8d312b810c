"""Plain text: the column text, learnt whole."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.base import BadRow, Raw, as_object, string, system_of, with_context


def read(raw: Any) -> Raw:
    """The text."""
    row = as_object(raw)
    found = with_context(row, {"text": string(row, "text")}, "text")
    if lost := [key for key in ("tools", "images") if key in found] + ["system"] * bool(system_of(row)):
        raise BadRow(f"has {lost[0]!r} beside its text", "write a conversation (messages), or remove the key")
    return found
