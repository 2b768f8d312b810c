"""``response_format``: plain text, a JSON object, or JSON of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gym_fed.serving.openai.fields import RequestModel, known_type


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"]


class NamedSchema(RequestModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Either way the schema is enforced."""

    description: str | None = None
    """Like ``name`` not shown to the model, for which templates have no place."""


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")],
    known_type("response_format", "text", "json_object", "json_schema"),
]
