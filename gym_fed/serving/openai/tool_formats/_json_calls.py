"""Parse JSON tool calls incrementally, and stream their arguments while they are generated."""

from __future__ import annotations

import json
import re
from typing import Any

from gym_fed.serving.openai.tool_formats.base import (
    MAX_CALL_CHARACTERS,
    MAX_LEAD_CHARACTERS,
    CallReader,
    MoreArguments,
    NewCall,
    Part,
    PlainText,
    ReadParts,
    Tools,
)

_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\{\s*"((?:[^"\\]|\\.)*)"')
_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "function"})
ARGUMENTS = ("arguments", "parameters")


class JsonSpan:
    """Finds the end of a JSON value that arrives in pieces, without validating it."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the position in ``text`` at which the value ends; None if it has not ended yet."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            match = (_INSIDE if self._string else _OUTSIDE).search(text, at)
            if match is None:
                return None
            mark, at = match[0], match.end()
            if mark == "\\":
                self._escaped = True
            elif mark == '"':
                self._string = not self._string
            elif mark in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


class JsonCallReader(CallReader):
    """Reads one call: an object with a name and arguments, or a name followed by an object with arguments.

    Args:
        mark: The text that announced the call; returned as text if no call follows.
        tools: The tools that may be called.
        fragments: True to stream the name and arguments as they are generated. This requires grammar-constrained calls,
            since fragments that were sent cannot be taken back.
        lead: Pattern of the text before the object; its group ``name``, if any, is the call's name.
        tail: Text after the object that is part of the call, if present.
    """

    def __init__(
        self, mark: str, tools: Tools, *, fragments: bool, lead: str = r"\s*", tail: str = ""
    ) -> None:
        self._mark, self._tools, self._fragments = mark, tools, fragments
        self._lead, self._tail = re.compile(lead), tail
        self._held = ""
        self._pieces: list[str] = []
        self._length = 0
        self._name: str | None = None
        self._span: JsonSpan | None = None
        self._arguments: JsonSpan | None = None
        self._started = self._checked = self._other = self._complete = False

    def feed(self, text: str) -> ReadParts:
        if self._complete:
            return self._after(self._held + text)
        if self._span is None:
            self._held += text
            begin = self._held.find("{")
            if begin < 0 and len(self._held) <= MAX_LEAD_CHARACTERS:
                return ReadParts()
            lead = self._lead.fullmatch(self._held, 0, max(begin, 0)) if begin >= 0 else None
            if lead is None:
                return ReadParts([PlainText(self._mark)], self._held)
            self._name = lead.groupdict().get("name")
            self._pieces.append(self._held[:begin])
            text, self._held, self._span = self._held[begin:], "", JsonSpan()
        return self._object(text)

    def end(self) -> list[Part]:
        if self._complete:
            return [] if self._started else self._call(self._held)
        if self._started:  # the call was cut off, but its beginning has been passed on
            return []
        return [PlainText(self._mark + "".join(self._pieces) + self._held)]

    def _object(self, text: str) -> ReadParts:
        assert self._span is not None
        stop = self._span.feed(text)
        inside = text if stop is None else text[:stop]
        self._pieces.append(inside)
        self._length += len(inside)
        parts = self._passed_on(inside) if self._fragments else []
        if stop is None:
            if not self._started and (self._length > MAX_CALL_CHARACTERS or self._is_other()):
                return ReadParts([*parts, *self._no_call()], "")
            return ReadParts(parts)
        self._complete = True
        reading = self._after(text[stop:])
        return ReadParts([*parts, *reading.parts], reading.rest)

    def _after(self, text: str) -> ReadParts:
        """Wait for the rest of the tail if its beginning has arrived."""
        trimmed = text.lstrip()
        if self._tail and len(trimmed) < len(self._tail) and self._tail.startswith(trimmed):
            self._held = text[:MAX_LEAD_CHARACTERS]
            return ReadParts()
        end = (
            len(text) - len(trimmed) + len(self._tail) if trimmed.startswith(self._tail) and self._tail else 0
        )
        return ReadParts([] if self._started else self._call(text[:end]), text[end:])

    def _passed_on(self, text: str) -> list[Part]:
        """Return the parts of the call that can be streamed after ``text``: its name, once known, and new arguments."""
        if self._arguments is None:
            if self._started:
                return []
            sofar = "".join(self._pieces[1:])
            if self._name is not None:
                start, name = 0, self._name
            else:
                head = _HEAD.match(sofar) if len(sofar) <= 4 * MAX_LEAD_CHARACTERS else None
                if head is None:
                    return []
                start, name = head.end(), head[1]
            if name not in self._tools or len(sofar) <= start:
                return []
            self._started, self._arguments = True, JsonSpan()
            stop = self._arguments.feed(sofar[start:])
            shown = sofar[start:] if stop is None else sofar[start : start + stop]
            self._arguments = self._arguments if stop is None else None
            return [NewCall(name, ""), MoreArguments(shown)]
        stop = self._arguments.feed(text)
        if stop is not None:
            self._arguments, text = None, text[:stop]
        return [MoreArguments(text)] if text else []

    def _is_other(self) -> bool:
        """Return True if an object's first key shows that it is not a call."""
        if not self._checked and self._name is None:
            match = _FIRST_KEY.match("".join(self._pieces[1:]))
            self._checked = match is not None or self._length > MAX_LEAD_CHARACTERS
            self._other = self._checked and (match is None or match[1] not in _KEYS)
        return self._other

    def _call(self, tail: str = "") -> list[Part]:
        call = call_of("".join(self._pieces[1:]), self._tools, self._name)
        return [call] if call is not None else self._no_call(tail)

    def _no_call(self, tail: str = "") -> list[Part]:
        """Return the text unchanged, as a malformed call if a mark or its first key suggests a call."""
        malformed = bool(self._mark.strip()) or not self._is_other()
        return [PlainText(self._mark + "".join(self._pieces) + tail, malformed)]


def call_of(text: str, tools: Tools, name: str | None = None) -> NewCall | None:
    """Parse a JSON object with a name and arguments, or only arguments if ``name`` is set; None if it is not a call."""
    try:
        value: Any = json.loads(text)
        if name is None:
            value = value.get("function", value) if value.get("type") == "function" else value
            name, value = value["name"], next((value[key] for key in ARGUMENTS if key in value), {})
        if isinstance(value, str):
            value = json.loads(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or name not in tools or not isinstance(value, dict):
        return None
    return NewCall(name, json.dumps(value, ensure_ascii=False))
