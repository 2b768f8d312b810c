"""The base class of Mistral's two formats, with their mark, ids of nine characters, and a common reader."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Sequence

from gym_fed.serving.openai.tool_formats._json_calls import JsonCallReader
from gym_fed.serving.openai.tool_formats.base import (
    CallReader,
    NewCall,
    Part,
    PlainText,
    ReadParts,
    Row,
    ToolFormat,
    Tools,
)

MARK, ID_MARK, ARGUMENTS_MARK = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LETTERS = string.ascii_letters + string.digits
_ID = re.compile(r"[A-Za-z0-9]{9}")
_NAMED = r"\s*(?P<name>[A-Za-z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]{1,64}\s*)?(?:\[ARGS\])?\s*"


class MistralFormat(ToolFormat):
    """The common parts of Mistral's formats."""

    marks = (MARK,)
    controls = (ID_MARK, ARGUMENTS_MARK)
    opening = MARK

    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        return MistralReader(mark, tools, fragments)

    def prepare(self, rows: Sequence[Row], tools: Sequence[Row], *, system: bool) -> list[Row]:
        """Replace ids that the templates reject with nine characters derived from their digests."""
        return [_with_short_ids(row) for row in rows]

    def call_id(self) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))


class MistralReader(CallReader):
    """Reads ``[{"name": ..., "arguments": {...}}, ...]`` or ``name[ARGS]{...}``."""

    def __init__(self, mark: str, tools: Tools, fragments: bool) -> None:
        self._tools, self._fragments = tools, fragments
        self._lead = mark  # returned as text unless a call follows
        self._held = ""
        self._call: JsonCallReader | None = None
        self._listed: bool | None = None
        self._found = False

    def feed(self, text: str) -> ReadParts:
        self._held += text
        parts: list[Part] = []
        while True:
            if self._call is not None:
                reading = self._call.feed(self._held)
                parts += reading.parts
                self._found = self._found or any(isinstance(part, NewCall) for part in reading.parts)
                if reading.rest is None:
                    self._held = ""
                    return ReadParts(parts)
                self._held, self._call, self._lead = reading.rest, None, ""
                if not self._listed:
                    return ReadParts(parts, self._held)
            trimmed = self._held.lstrip()
            if not trimmed:
                return ReadParts(parts)
            if trimmed[0] == "]" and self._listed:
                end = [] if self._found else [PlainText(self._lead + self._held[: -len(trimmed[1:]) or None])]
                return ReadParts([*parts, *end], trimmed[1:])
            if self._listed is None:
                self._listed = trimmed[0] == "["
            if not self._listed:
                self._call = self._reader(_NAMED)
            elif trimmed[0] in "[,":
                self._lead += self._held[: len(self._held) - len(trimmed) + 1]
                self._held = trimmed[1:]
            elif trimmed[0] == "{":
                self._call = self._reader()
            else:
                return ReadParts([*parts, *self._lead_as_text()], self._held)

    def end(self) -> list[Part]:
        if self._call is not None:
            return self._call.end()
        self._lead += self._held
        return self._lead_as_text()

    def _lead_as_text(self) -> list[Part]:
        return [PlainText(self._lead)] if self._lead and not self._found else []

    def _reader(self, lead: str = r"\s*") -> JsonCallReader:
        return JsonCallReader(self._lead, self._tools, fragments=self._fragments, lead=lead)


def _with_short_ids(row: Row) -> Row:
    row = dict(row)
    if "tool_call_id" in row:
        row["tool_call_id"] = short_id(row["tool_call_id"])
    if "tool_calls" in row:
        row["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in row["tool_calls"]]
    return row


def short_id(text: str) -> str:
    """Return an id of nine letters and digits: the given one if it has this form."""
    if _ID.fullmatch(text):
        return text
    number = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")
    letters = []
    for _ in range(9):
        number, place = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[place])
    return "".join(letters)
