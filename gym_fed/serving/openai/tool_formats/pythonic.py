"""Pythonic tool calls: ``[name(key=value), ...]`` alone, or in ``<|tool_call_start|>...<|tool_call_end|>``."""

from __future__ import annotations

import ast
import json
import re
import warnings

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
)

MARK, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_MAX_CHARACTERS = MAX_CALL_CHARACTERS // 8
_MAX_DEPTH = 32
_CONSTANTS = {"true": True, "false": False, "null": None}
_BEGINNING = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]{0,63}\s*(?:\(.*)?)?", re.DOTALL)


class Pythonic(ToolFormat):
    """The format of LFM2, and of Llama 3.2 and 4 with the templates that request it."""

    order = 60
    marks = (MARK,)
    controls = (CLOSE,)
    bare = "["

    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        return PythonicReader(mark, tools)

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        raise CannotHold("calls in Python syntax cannot be constrained by a schema")


class PythonicReader(CallReader):
    """Reads a list of calls with literals as arguments; nothing is evaluated."""

    def __init__(self, mark: str, tools: Tools) -> None:
        self._mark, self._tools = mark, tools
        self._text = ""
        self._at = self._depth = 0
        self._quote = ""
        self._calls: list[Part] | None = None

    def feed(self, text: str) -> ReadParts:
        self._text += text
        if self._calls is not None:
            return self._after()
        if _BEGINNING.fullmatch(self._text.lstrip()[:MAX_LEAD_CHARACTERS]) is None and self._text.strip():
            return ReadParts([PlainText(self._mark, malformed=self._mark == MARK)], self._text)
        stop = self._span()
        if self._depth > _MAX_DEPTH or (stop is None and len(self._text) > _MAX_CHARACTERS):
            return ReadParts([PlainText(self._mark + self._text)], "")
        if stop is None:
            return ReadParts()
        calls = calls_of(self._text[:stop].strip(), self._tools)
        self._calls = list(calls) if calls else [PlainText(self._mark + self._text[:stop])]
        self._text = self._text[stop:]
        return self._after()

    def end(self) -> list[Part]:
        return [PlainText(self._mark + self._text)] if self._calls is None else self._calls

    def _after(self) -> ReadParts:
        assert self._calls is not None
        if isinstance(self._calls[0], PlainText):
            return ReadParts(self._calls, self._text)
        trimmed = self._text.lstrip()
        if self._mark == MARK and len(trimmed) < len(CLOSE) and CLOSE.startswith(trimmed):
            return ReadParts()
        return ReadParts(self._calls, trimmed.removeprefix(CLOSE) if self._mark == MARK else self._text)

    def _span(self) -> int | None:
        """Return the position after the list's end; None if it has not ended yet."""
        text = self._text
        while self._at < len(text):
            if self._quote:
                letter = text[self._at]
                if letter == "\\" and self._at + 1 == len(text):
                    return None
                self._at += 2 if letter == "\\" else 1
                self._quote = "" if letter == self._quote else self._quote
                continue
            match = _OUTSIDE.search(text, self._at)
            if match is None:
                self._at = len(text)
                return None
            self._at = match.end()
            if match[0] in "\"'":
                self._quote = match[0]
            elif match[0] in "([{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return None


def calls_of(text: str, tools: Tools) -> list[NewCall]:
    """Parse a list of calls in Python syntax; empty if a tool is unknown or an argument is not a literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide warnings about invalid escapes that the model wrote
            tree = ast.parse(text, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else []
        return [_call(call, tools) for call in calls]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr, tools: Tools) -> NewCall:
    before = ""
    # Python parses a hyphen in a name as a minus
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        before, node = f"{ast.unparse(node.left)} - ".replace(" - ", "-"), node.right
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    name = _tool(before + ast.unparse(node.func), tools)
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not an argument name")
        arguments[keyword.arg] = _value(keyword.value)
    return NewCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _tool(name: str, tools: Tools) -> str:
    """Return the tool with that name, or the one whose hyphens the model wrote as underscores."""
    meant = [name] if name in tools else [tool for tool in tools if tool.replace("-", "_") == name]
    if len(meant) != 1:
        raise ValueError("no tool of that name")
    return meant[0]


def _value(node: ast.expr) -> object:
    """Evaluate a literal, or JSON's names for True, False and None."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("not the name of a value")
        return {
            str(ast.literal_eval(key)): _value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    literal = ast.literal_eval(node)
    if not isinstance(literal, str | int | float | bool | None):
        raise ValueError("not a JSON value")
    return literal
