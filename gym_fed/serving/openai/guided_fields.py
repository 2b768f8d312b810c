"""vLLM's fields that hold an answer to a pattern, a choice, a schema or a grammar, in its older and its newer form.

The older ones are ``guided_regex``, ``guided_choice``, ``guided_json`` and ``guided_grammar``. The newer one is
``structured_outputs`` with ``regex``, ``choice``, ``json``, ``json_object`` or ``grammar``.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field, model_validator

from gym_fed.serving.engine.guided import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PATTERN_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
)
from gym_fed.serving.engine.request import Grammar, GrammarKind
from gym_fed.serving.openai.fields import ChoiceFields, RequestModel, off, only
from gym_fed.serving.openai.refusals import RequestError

Schema = dict[str, Any] | Annotated[str, Field(max_length=MAX_SCHEMA_CHARACTERS)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
Notation = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
_SCHEMA_FIELDS = ("response_format", "tools", "guided_json", "structured_outputs.json")
Nothing = Annotated[Any, only(False)]


def refusal_name(field: str) -> str:
    """The code of an error about what this field holds the answer to."""
    return "invalid_json_schema" if field in _SCHEMA_FIELDS else "invalid_value"


class StructuredOutputs(RequestModel):
    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Notation | None = None
    structural_tag: Nothing = None
    disable_fallback: Annotated[Any, only(False, True)] = None
    """There is no other backend to fall back to."""

    disable_any_whitespace: Nothing = None
    disable_additional_properties: Nothing = None
    whitespace_pattern: Nothing = None


class GuidedFields(ChoiceFields):
    """Any one of them may be given."""

    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Notation | None = None
    guided_decoding_backend: Annotated[Any, only("auto", "guidance")] = None
    guided_whitespace_pattern: Nothing = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _one_guide(self) -> GuidedFields:
        found = self._given()
        if len(found) > 1:
            raise off(
                found[1][0], f"{found[0][0]} and {found[1][0]} are given: an answer is held to one of them"
            )
        if self.structured_outputs is not None and not found:
            raise off("structured_outputs", "one of json, json_object, regex, choice and grammar is needed")
        if found and found[0][1].kind == "json_schema":
            self.require_uncut()
        return self

    def require_uncut(self) -> None:
        """Refuse what may end a JSON value in its middle."""
        for name, given in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if given:
                raise off(name, "an answer that is held to a schema cannot be cut short: give one of them")

    @property
    def guided(self) -> tuple[str, Grammar] | None:
        """What the answer is held to, and the field that says so."""
        found = self._given()
        return found[0] if found else None

    @property
    def guiding_field(self) -> str:
        """The field to blame for what the answer is held to."""
        return self.guided[0] if self.guided else "response_format"

    def guiding(self) -> dict[str, Any]:
        """The engine's parameters for it.

        Raises:
            RequestError: For more than is compiled.
        """
        if self.guided is None:
            return {}
        field, grammar = self.guided
        if len(grammar.text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(
                f"field {field!r}: {len(grammar.text):,} characters; {MAX_SCHEMA_CHARACTERS:,} are allowed",
                param=field,
                name=refusal_name(field),
            )
        return {"json_schema": grammar.text} if grammar.kind == "json_schema" else {"grammar": grammar}

    def _given(self) -> list[tuple[str, Grammar]]:
        newer = self.structured_outputs or StructuredOutputs()
        kinds: tuple[tuple[GrammarKind, str, Any, str, Any], ...] = (
            ("json_schema", "guided_json", self.guided_json, "structured_outputs.json", newer.json_),
            ("json_schema", "", None, "structured_outputs.json_object", "{}" if newer.json_object else None),
            ("regex", "guided_regex", self.guided_regex, "structured_outputs.regex", newer.regex),
            ("choice", "guided_choice", self.guided_choice, "structured_outputs.choice", newer.choice),
            ("grammar", "guided_grammar", self.guided_grammar, "structured_outputs.grammar", newer.grammar),
        )
        return [
            (field, Grammar(kind, value if isinstance(value, str) else json.dumps(value)))
            for kind, older, old_value, newer_field, new_value in kinds
            for field, value in ((older, old_value), (newer_field, new_value))
            if value is not None
        ]
