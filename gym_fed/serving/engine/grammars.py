"""From what an answer must be (a JSON value, a text of a pattern, one of some texts, ...) to llguidance's grammar.

Everything here comes from callers: sizes are bounded before anything is compiled, and llguidance bounds the work.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import Grammar

_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,8}|\n\t{1,3})?",
}
MAX_SCHEMA_CHARACTERS = 200_000
MAX_PATTERN_CHARACTERS = 4096
MAX_GRAMMAR_CHARACTERS = 20_000
MAX_CHOICES = 4096
_MAX_REASON = 500

_WORDS = {
    "json_schema": ("the JSON schema", MAX_SCHEMA_CHARACTERS),
    "regex": ("the regular expression", MAX_PATTERN_CHARACTERS),
    "choice": ("the list of choices", MAX_SCHEMA_CHARACTERS),
    "grammar": ("the grammar", MAX_GRAMMAR_CHARACTERS),
    "calls": ("the tools' schemas", MAX_SCHEMA_CHARACTERS * 2),
}


def said_of(grammar: Grammar) -> str:
    """What errors call it."""
    return _WORDS[grammar.kind][0]


def compiled(grammar: Grammar) -> str:
    """What llguidance's matcher takes.

    Raises:
        GymError: ``DATA_INVALID`` for what cannot be enforced, ``TOO_LARGE`` for what is too long.
    """
    words, most = _WORDS[grammar.kind]
    if len(grammar.text) > most:
        raise GymError(
            ErrorCode.TOO_LARGE, f"{words} has {len(grammar.text):,} characters; {most:,} are allowed"
        )
    try:
        return _MAKERS[grammar.kind](grammar.text)
    except (ValueError, RecursionError) as error:  # also nested too deep for the library
        raise not_enforced(words, str(error)) from error


def not_enforced(words: str, reason: str) -> GymError:
    """For what llguidance refuses. Of a pattern it quotes the place first, and names the fault later."""
    lines = reason.splitlines() or ["no reason given"]
    said = next((line for line in lines if line.startswith("error: ")), lines[0])
    return GymError(
        ErrorCode.DATA_INVALID,
        f"{words} cannot be enforced: {said.removeprefix('error: ')[:_MAX_REASON]}",
        "leave what is named out, make it simpler, or ask for plain text",
    )


def _of_schema(text: str) -> str:
    from llguidance import LLMatcher

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"the JSON schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise GymError(ErrorCode.DATA_INVALID, f"a JSON schema is an object, not {text[:40]!r}")
    found: str = LLMatcher.grammar_from_json_schema(
        text if value else '{"type": "object"}', overrides=_OPTIONS
    )
    return found


def _of_pattern(text: str) -> str:
    from llguidance import LLMatcher

    found: str = LLMatcher.grammar_from_regex(text)
    return found


def _of_choices(text: str) -> str:
    """Of a JSON list of texts. They are one terminal: as rules their number would be bounded."""
    from llguidance import LLMatcher

    texts = " | ".join(map(json.dumps, json.loads(text)))
    found: str = LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    return found


def _of_notation(text: str) -> str:
    """Of Lark's notation, or of GBNF (llama.cpp's EBNF), whose first rule is ``root``."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(text) is None:
        try:
            text = gbnf_to_lark(_GBNF_PIECE.sub(_without_start, text))
        except Exception as error:  # the converter raises its own kinds for its own reasons
            raise ValueError(str(error) or repr(error)) from error
    found: str = LLMatcher.grammar_from_lark(text)
    return found


_LARK = re.compile(
    r"^[ \t]*(?:%llguidance\b|[?!]{0,2}start(?:\.-?\d+)?(?:\{[^}\n]*\})?(?:\[[^\]\n]*\])?[ \t]*:(?!:=))",
    re.MULTILINE,
)
"""A line of Lark's notation: a rule ``start``, perhaps with a priority or options, or llguidance's own first line."""
_GBNF_PIECE = re.compile(
    r"""(?P<text>"(?:\\.?|[^"\\])*(?:"|\Z)|\[(?:\\.?|[^\]\\])*(?:\]|\Z)|\#[^\n]*)|(?<![\w-])start(?![\w-])""",
    re.DOTALL,
)


def _without_start(piece: re.Match[str]) -> str:
    """Rules of GBNF called ``start`` get another name: in Lark's notation that is the first rule's."""
    return piece[0] if piece["text"] else "start-of-gbnf"


def _of_calls(text: str) -> str:
    """Of ``{"lark": ..., "schemas": {name: schema}}``; see ``ToolTemplate.grammar``."""
    value = json.loads(text)
    grammars: list[dict[str, Any]] = [{"name": "calls", "lark_grammar": value["lark"]}]
    for name, schema in value["schemas"].items():
        made = json.loads(_of_schema(json.dumps(schema)))["grammars"][0]
        grammars.append({"name": name, "json_schema": made["json_schema"]})
    return json.dumps({"grammars": grammars})


_MAKERS = {
    "json_schema": _of_schema,
    "regex": _of_pattern,
    "choice": _of_choices,
    "grammar": _of_notation,
    "calls": _of_calls,
}
