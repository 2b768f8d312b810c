"""Llama 3's format: ``{"name": ..., "parameters": {...}}`` as the answer, or after ``<|python_tag|>``."""

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

MARK = "<|python_tag|>"
_HEAD, _BETWEEN = '{"name": "', '", "parameters": '


class Llama(ToolFormat):
    """The format of Llama 3.1, 3.2 and 3.3. Their templates render one call per message."""

    order = 50
    marks = (MARK,)
    bare = "{"

    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        return JsonCallReader(mark, tools, fragments=fragments, tail=";")

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        body, schemas = bodies(tools, quoted(f"NAME{_BETWEEN}"), quoted("}"))
        rules = f"body: {quoted(_HEAD)} ({body})\n"
        if required:
            return CallGrammar(f"start: body\n{rules}", schemas)
        calls = "body" if one else "body (/; ?/ body)*"
        return CallGrammar(
            f"start: WORDS | calls | begin calls\ncalls: {calls}\n"
            'WORDS: /(.|\\n)*/ & ~/[ \\n]*\\{ ?"name"(.|\\n)*/\n'
            f"begin[lazy]: WORDS {mark(MARK)}\n{rules}",
            schemas,
        )
