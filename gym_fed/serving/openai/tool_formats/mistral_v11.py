"""Mistral's format since its tokenizer v11: ``[TOOL_CALLS]name[ARGS]{...}``, once for each call."""

from __future__ import annotations

from gym_fed.serving.openai.tool_formats._mistral import ARGUMENTS_MARK, ID_MARK, MARK, MistralFormat
from gym_fed.serving.openai.tool_formats.base import CallGrammar, Tools, bodies, mark, quoted


class MistralV11(MistralFormat):
    """The format of Mistral Small 3.1 and later, Devstral, Magistral and Ministral."""

    order = 31

    def __init__(self) -> None:
        self._with_id, self._with_mark = False, True

    def learn(self, written: str) -> bool:
        if MARK not in written:
            return False
        self._with_id, self._with_mark = ID_MARK in written, ARGUMENTS_MARK in written
        return True

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        between = f"{mark(ID_MARK)} /[A-Za-z0-9]{{9}}/ " if self._with_id else ""
        between += mark(ARGUMENTS_MARK) if self._with_mark else ""
        body, schemas = bodies(tools, f"{quoted('NAME')} {between}", "")
        rules = f"body: {body}\n"
        if required:
            return CallGrammar(f"start: body\n{rules}", schemas)
        start = "TEXT | call" if one else "TEXT | call (next body)*"
        return CallGrammar(
            f"start: {start}\ncall: begin body\nbegin[lazy]: TEXT {mark(MARK)}\nnext: {mark(MARK)}\n{rules}",
            schemas,
        )
