"""Mistral's format up to its tokenizer v7: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``."""

from __future__ import annotations

import re

from gym_fed.serving.openai.tool_formats._mistral import MARK, MistralFormat
from gym_fed.serving.openai.tool_formats.base import CallGrammar, Tools, bodies, mark, quoted


class Mistral(MistralFormat):
    """The format of Mistral 7B v0.3, Mixtral 8x22B, Nemo and Large 2."""

    order = 30

    def learn(self, written: str) -> bool:
        return re.search(r"\[TOOL_CALLS\]\s*\[", written) is not None

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        body, schemas = bodies(tools, quoted('{"name": "NAME", "arguments": '), quoted("}"))
        more = "" if one or required else '(", " body)*'
        rules = f'calls: /\\s?/ "[" body {more} "]"\nbody: {body}\n'
        if required:
            return CallGrammar(f"start: calls\n{rules}", schemas)
        return CallGrammar(f"start: TEXT | begin calls\nbegin[lazy]: TEXT {mark(MARK)}\n{rules}", schemas)
