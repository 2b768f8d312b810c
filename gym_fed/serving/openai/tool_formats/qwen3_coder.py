"""Qwen3-Coder's tool calls: ``<tool_call>`` with a ``<function=name>`` that has a ``<parameter=key>`` per argument."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from gym_fed.core.json_files import no_constant
from gym_fed.serving.openai.tool_formats.base import (
    MAX_CALL_CHARACTERS,
    MAX_LEAD_CHARACTERS,
    CallGrammar,
    CallReader,
    CannotHold,
    NewCall,
    Part,
    PlainText,
    ReadParts,
    ToolFormat,
    Tools,
    mark,
    quoted,
)
from gym_fed.serving.openai.tool_formats.hermes import CLOSE, OPEN

_FUNCTION, _FUNCTION_END, _PARAMETER_END = "<function=", "</function>", "</parameter>"
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_VALUE_END = f"\n{_PARAMETER_END}\n"
_UNTYPED = ("string",)
_MAX_REFERENCES = 8
_ENFORCEABLE = frozenset({"type", "title", "description", "default", "examples", "enum", "const"})
"""Keywords of string schemas that can be enforced; others would need a grammar of unquoted text."""


class Qwen3Coder(ToolFormat):
    """The format of Qwen3-Coder, Qwen3.5 and later, and Nemotron 3."""

    order = 20
    marks = (OPEN, _FUNCTION)
    controls = (CLOSE,)
    close = CLOSE
    opening = f"{OPEN}\n"

    def hinted(self, shown: str) -> bool:
        return _FUNCTION in shown and "<parameter=" in shown

    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        return XmlReader(mark, tools)

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        schemas: dict[str, Any] = {}
        bodies, rules = [], [f"any_text[lazy]: TEXT {quoted(_VALUE_END)}"]
        for number, (name, parameters) in enumerate(tools.items()):
            keys = []
            for place, (key, needed, values) in enumerate(_parameters(name, parameters or {})):
                rule = f"p_{number}_{place}"
                words = [_value_rule(value, f"{rule}_{index}", schemas) for index, value in enumerate(values)]
                begin = quoted(f"<parameter={key}>\n")
                rules.append(f"{rule}: {begin} ({' | '.join(words)})")
                keys.append(rule if needed else f"{rule}?")
            begin = quoted(f"{_FUNCTION}{name}>\n")
            bodies.append(f"{begin} {' '.join(keys)} {quoted(_FUNCTION_END)}")
        lines = "\n".join([f"body: {' | '.join(bodies)}", *rules]) + "\n"
        if required:
            return CallGrammar(f"start: body\n{lines}", schemas)
        start = "TEXT | call" if one else "call* TEXT"
        return CallGrammar(
            f'start: {start}\ncall: begin "\\n" body "\\n" {mark(CLOSE)}\nbegin[lazy]: TEXT {mark(OPEN)}\n{lines}',
            schemas,
        )


def _value_rule(value: Any, name: str, schemas: dict[str, Any]) -> str:
    """Return the grammar rule of a value and its end tag; the schema of a JSON value is added to ``schemas``."""
    if value is None:
        return "any_text"
    if isinstance(value, str):
        return quoted(f"{value}{_VALUE_END}")
    schemas[name] = value
    return f"@{name} {quoted(_VALUE_END)}"


class XmlReader(CallReader):
    """Reads one call in Qwen3-Coder's format.

    Args:
        mark: The text that announced the call.
        tools: The tools that may be called; their schemas say which arguments are not strings.
    """

    def __init__(self, mark: str, tools: Tools) -> None:
        self._mark, self._tools = mark, tools
        self._text = "" if mark != _FUNCTION else _FUNCTION
        self._searched = 0
        self._call: list[Part] | None = None

    def feed(self, text: str) -> ReadParts:
        self._text += text
        if self._call is not None:
            return self._after()
        trimmed = self._text.lstrip()
        if (
            not trimmed.startswith(_FUNCTION[: len(trimmed)])
            or len(self._text) - len(trimmed) > MAX_LEAD_CHARACTERS
        ):
            return ReadParts([PlainText(self._mark)], self._text)
        end = self._text.find(_FUNCTION_END, max(0, self._searched - len(_FUNCTION_END)))
        self._searched = len(self._text)
        if end < 0 and len(self._text) > MAX_CALL_CHARACTERS:
            return ReadParts(self._no_call(self._text), "")
        if end < 0:
            return ReadParts()
        end += len(_FUNCTION_END)
        call = call_of(self._text[:end].strip(), self._tools)
        self._call = self._no_call(self._text[:end]) if call is None else [call]
        self._text = self._text[end:]
        return self._after()

    def end(self) -> list[Part]:
        return self._no_call(self._text) if self._call is None else self._call

    def _after(self) -> ReadParts:
        assert self._call is not None
        if isinstance(self._call[0], PlainText):
            return ReadParts(self._call, self._text)
        trimmed = self._text.lstrip()
        if len(trimmed) < len(CLOSE) and CLOSE.startswith(trimmed):
            return ReadParts()
        return ReadParts(self._call, trimmed.removeprefix(CLOSE) if trimmed.startswith(CLOSE) else self._text)

    def _no_call(self, text: str) -> list[Part]:
        return [PlainText(text if self._mark == _FUNCTION else self._mark + text)]


def call_of(text: str, tools: Tools) -> NewCall | None:
    """Parse ``<function=name>...</function>``; None if the tool is unknown."""
    name, _, body = text.removeprefix(_FUNCTION).removesuffix(_FUNCTION_END).partition(">")
    if name not in tools:
        return None
    root = tools[name] or {}
    properties = root.get("properties")
    arguments = {}
    for key, value in _PARAMETER.findall(body):
        schema = properties.get(key) if isinstance(properties, dict) else None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, _types(schema, root))
    return NewCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _typed(value: str, types: tuple[str, ...]) -> Any:
    if "string" in types and not (value == "null" and "null" in types):
        return value
    try:
        return json.loads(
            value.lower() if value in ("True", "False", "None") else value, parse_constant=no_constant
        )
    except (ValueError, RecursionError):
        return value


def _types(schema: Any, root: dict[str, Any], depth: int = 0) -> tuple[str, ...]:
    """Return the types that a value may have; ``string`` if the schema has none."""
    if depth > _MAX_REFERENCES:
        raise CannotHold("an anyOf refers to itself: remove that alternative")
    schema = _resolved(schema, root)
    if "anyOf" in schema:
        return tuple(kind for option in _dicts(schema["anyOf"]) for kind in _types(option, root, depth + 1))
    types = schema.get("type", _UNTYPED)
    return (types,) if isinstance(types, str) else tuple(map(str, types))


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Resolve ``$ref`` within the schema."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for key in reference[2:].split("/"):
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    return {}


def _parameters(name: str, root: dict[str, Any]) -> Iterator[tuple[str, bool, list[Any]]]:
    """Yield each key, whether it is required, and its possible values: a schema, a string, or None for any text."""
    properties = root.get("properties", {})
    if not isinstance(properties, dict) or {"$ref", "anyOf", "oneOf", "allOf"} & root.keys():
        raise CannotHold(f"the parameters of {name!r} must be properties of one object")
    required = root.get("required")
    for key, schema in properties.items():
        if not key or set(key) & set(">\n"):
            raise CannotHold(
                f"the parameter {key!r} of {name!r} cannot be written in this model's tool-call format"
            )
        needed = isinstance(required, list) and key in required
        yield key, needed, _values(f"{name}.{key}", schema, root)


def _values(place: str, schema: Any, root: dict[str, Any]) -> list[Any]:
    schema = _resolved(schema, root)
    if "anyOf" in schema:
        return [value for option in _dicts(schema["anyOf"]) for value in _values(place, option, root)]
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return words
    if "string" not in _types(schema, root):
        return [{**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}]
    if len(_types(schema, root)) > 1 or schema.keys() - _ENFORCEABLE or words is not None:
        off = ", ".join(sorted(schema.keys() - _ENFORCEABLE)) or "several types"
        raise CannotHold(
            f"{place} is a string with {off}, which cannot be enforced in this model's tool-call format"
        )
    return [None]


def _dicts(value: Any) -> list[Any]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
