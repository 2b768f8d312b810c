"""vLLM's fields for guided decoding, ``response_format``, and their errors.

The older fields are ``guided_regex``, ``guided_choice``, ``guided_json`` and ``guided_grammar``. The newer field is
``structured_outputs`` with ``regex``, ``choice``, ``json``, ``json_object`` or ``grammar``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.engine.guided import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PATTERN_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
)
from gym_fed.serving.engine.request import Grammar, GrammarKind
from gym_fed.serving.openai.catalogue import Model
from gym_fed.serving.openai.fields import RequestModel, SamplingFields, known_type, off, only
from gym_fed.serving.openai.refusals import RequestError, model_not_found

Schema = dict[str, Any] | Annotated[str, Field(max_length=MAX_SCHEMA_CHARACTERS)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
Notation = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
_SCHEMA_FIELDS = ("response_format", "tools", "guided_json", "structured_outputs.json")
Nothing = Annotated[Any, only(False)]
MAX_ANSWERS = 16
"""Maximum number of answers of one prompt."""


def refusal_name(field: str) -> str:
    """Return the error code for a refused grammar, by the field that contains it."""
    return "invalid_json_schema" if field in _SCHEMA_FIELDS else "invalid_value"


class StructuredOutputs(RequestModel):
    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Notation | None = None
    structural_tag: Nothing = None
    disable_fallback: Annotated[Any, only(False, True)] = None
    """Accepted without effect, since there is no other backend to fall back to."""

    disable_any_whitespace: Nothing = None
    disable_additional_properties: Nothing = None
    whitespace_pattern: Nothing = None


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class GuidedFields(SamplingFields):
    """Further fields that chat and completions share; at most one field for guided decoding may be given."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stream_options: StreamOptions | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Notation | None = None
    guided_decoding_backend: Annotated[Any, only("auto", "guidance")] = None
    guided_whitespace_pattern: Nothing = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _validate_stream_options(self) -> GuidedFields:
        if self.stream_options is not None and not self.stream:
            raise off("stream_options", "stream_options needs stream: true")
        return self

    @model_validator(mode="after")
    def _validate_guides(self) -> GuidedFields:
        grammars = self._given()
        if len(grammars) > 1:
            raise off(
                grammars[1][0],
                f"{grammars[0][0]} and {grammars[1][0]} are mutually exclusive: an answer can follow one grammar",
            )
        if self.structured_outputs is not None and not grammars:
            raise off("structured_outputs", "set one of json, json_object, regex, choice and grammar")
        if grammars and grammars[0][1].kind == "json_schema":
            self.require_no_stops()
        return self

    def require_no_stops(self) -> None:
        """Refuse stop conditions that could cut off a JSON value."""
        for name, value in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids)):
            if value:
                raise off(name, "an answer that follows a schema cannot be truncated: send only one of them")

    @property
    def guided(self) -> tuple[str, Grammar] | None:
        """The grammar of the answer, and the field that it comes from."""
        grammars = self._given()
        return grammars[0] if grammars else None

    @property
    def guiding_field(self) -> str:
        """The name of the field to blame for an error in the grammar."""
        return self.guided[0] if self.guided else "response_format"

    def guiding(self) -> dict[str, Any]:
        """Return the engine's parameters for the grammar.

        Raises:
            RequestError: For a grammar that is too long to compile.
        """
        if self.guided is None:
            return {}
        field, grammar = self.guided
        if len(grammar.text) > MAX_SCHEMA_CHARACTERS:
            raise RequestError(
                f"field {field!r}: {counted(len(grammar.text), 'character')}; at most "
                f"{MAX_SCHEMA_CHARACTERS:,} are allowed",
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


class EngineErrors:
    """Translates the engine's errors to OpenAI's form; as a context manager, also those of ``submit`` and ``embed``.

    Args:
        model: The requested model.
        param: The field that has the text.
        schema_param: The field that has the schema.
    """

    def __init__(self, model: Model, param: str, schema_param: str = "response_format") -> None:
        self._model = model
        self._param = param
        self._schema_param = schema_param

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, GymError):
            return
        # only here, since after submission TOO_LARGE is about the variant, not the text
        if error.code is ErrorCode.TOO_LARGE:
            raise RequestError(
                error.message, param=self._param, name="context_length_exceeded", hint=error.hint
            ) from error
        if (translated := self.translate(error)) is not error:
            raise translated from error

    def translate(self, error: GymError) -> GymError:
        """Translate an error that may be raised at any time, even after submission."""
        if error.code is ErrorCode.NOT_FOUND:  # the variant was removed after it was looked up
            return model_not_found(self._model.name)
        if error.code is ErrorCode.DATA_INVALID:
            return RequestError(
                error.message,
                param=self._schema_param,
                name=refusal_name(self._schema_param),
                hint=error.hint,
            )
        return error


MAX_MULTIPLE = 50_000
"""Maximum value of ``multipleOf`` without trailing zeros, since a thousandth and a million are as simple as one."""

_NAME, _INLINE = "multipleOf", "%json"


def require_small_multiples(held_to: Grammar | None, field: str, name: str) -> None:
    """Refuse ``multipleOf`` values that would take long to compile.

    The automaton of the multiples of n has n states. A request of fifty characters could ask for a million, whose
    compilation takes a minute and gigabytes. If several apply at once, their least common multiple counts.

    Args:
        held_to: The grammar of the request, if it has one.
        field: The field to blame.
        name: The error code of the refusal.

    Raises:
        RequestError: If the multiples of a schema are too large.
    """
    together = 1
    for value in _multiples(_schemas(held_to)):
        together = math.lcm(together, value)
        if together > MAX_MULTIPLE:
            raise RequestError(
                f"field {field!r}: {_NAME} cannot be enforced: the least common multiple of all its values, without "
                f"trailing zeros, exceeds {MAX_MULTIPLE:,}",
                param=field,
                name=name,
                hint="omit it, and check the number afterwards",
            )


def _schemas(held_to: Grammar | None) -> list[Any]:
    """Return the JSON schemas in a grammar; invalid ones are left for the compiler to refuse."""
    if held_to is None or held_to.kind in ("regex", "choice"):
        return []
    text, decoder, schemas = held_to.text, json.JSONDecoder(), []
    starts = [0] if held_to.kind != "grammar" else _after(text, _INLINE)
    for start in starts:
        try:
            schemas.append(decoder.raw_decode(text, start)[0])
        except (ValueError, RecursionError):
            continue
    return schemas


def _after(text: str, word: str) -> list[int]:
    """Return the positions after each occurrence of a word."""
    positions, at = [], text.find(word)
    while at >= 0:
        start = at + len(word)
        positions.append(start + len(text[start:]) - len(text[start:].lstrip()))
        at = text.find(word, start)
    return positions


def _multiples(left: list[Any]) -> Iterator[int]:
    """Yield the values of ``multipleOf`` at all depths, without trailing zeros."""
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            number = value.get(_NAME)
            is_finite = isinstance(number, int) or (isinstance(number, float) and math.isfinite(number))
            if is_finite and not isinstance(number, bool):
                digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
                yield min(int(digits[:20] or 1), MAX_MULTIPLE + 1)


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"]


class NamedSchema(RequestModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted without effect, since the schema is always enforced."""

    description: str | None = None
    """Not shown to the model, like ``name``, since templates do not render it."""


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")],
    known_type("response_format", "text", "json_object", "json_schema"),
]
