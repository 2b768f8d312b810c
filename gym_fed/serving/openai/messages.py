"""The messages of a chat, as OpenAI's specification has them; text alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from gym_fed.serving.openai.fields import RequestModel, off, only


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


def _text_parts_only(value: Any) -> Any:
    """Refuse pictures, sound and files by their names."""
    if isinstance(value, list):
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise PydanticCustomError(
                    "unsupported",
                    "content parts of type {kind} are not supported here: text alone",
                    {"kind": repr(kind)},
                )
    return value


Content = Annotated[str | Annotated[list[TextPart], Field(min_length=1)], BeforeValidator(_text_parts_only)]
Nothing = Annotated[Any, only([])]


class FunctionCall(RequestModel):
    name: str
    arguments: str
    """JSON text."""


class ToolCall(RequestModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class _Message(RequestModel):
    name: Nothing = None


class InstructionMessage(_Message):
    """``developer`` is the newer word for ``system``, and is rendered as that."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: Nothing = None
    audio: Nothing = None
    annotations: Nothing = None
    function_call: Nothing = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise off("content", "an assistant's message has content, or tool_calls")
        return self


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def text_of(content: str | list[TextPart] | None) -> str:
    """The text of a message, its parts joined."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
