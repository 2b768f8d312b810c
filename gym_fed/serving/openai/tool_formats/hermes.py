"""Hermes' and Qwen's format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call."""

from __future__ import annotations

from gym_fed.serving.openai.tool_formats._json_calls import JsonCallReader
from gym_fed.serving.openai.tool_formats.base import (
    CallGrammar,
    CallReader,
    ToolFormat,
    Tools,
    bodies,
    mark,
    quoted,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """The format of Hermes 2 and 3, Qwen2.5 and Qwen3."""

    order = 10
    marks = (OPEN,)
    controls = (CLOSE,)
    close = CLOSE
    opening = f"{OPEN}\n"

    def hinted(self, shown: str) -> bool:
        return OPEN in shown and '"arguments"' in shown and "<function=" not in shown

    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        return JsonCallReader(mark, tools, fragments=fragments, tail=CLOSE)

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        body, schemas = bodies(tools, quoted('{"name": "NAME", "arguments": '), quoted("}"))
        rules = f"body: {body}\n"
        if required:
            return CallGrammar(f"start: body\n{rules}", schemas)
        start = "TEXT | call" if one else "call* TEXT"
        return CallGrammar(
            f'start: {start}\ncall: begin "\\n" body "\\n" {mark(CLOSE)}\nbegin[lazy]: TEXT {mark(OPEN)}\n{rules}',
            schemas,
        )
