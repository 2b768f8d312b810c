"""The schema of ``POST /v1/responses``: input items, tools, and text format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gym_fed.serving.openai.fields import (
    NEUTRAL,
    Neutral,
    RequestModel,
    SamplingFields,
    TemplateVariables,
    known_type,
    off,
    only,
)
from gym_fed.serving.openai.guided_fields import NamedSchema, PlainFormat
from gym_fed.serving.openai.schemas import MAX_MESSAGES, MAX_TOOLS, Budget, Effort, Function, Verbosity

LOGPROBS = "message.output_text.logprobs"
_IGNORED_INCLUDE = "reasoning.encrypted_content"
"""Accepted because stateless clients always send it; it has no effect, since reasoning items contain their text."""

RESPONSES_NEUTRAL: Neutral = {
    **NEUTRAL,
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "prompt": (),
}

ItemId = Annotated[str, Field(max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _TextContent(RequestModel):
    """A text; other fields of an earlier answer's ``output_text`` are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, only([])] = None
    logprobs: list[Any] | None = None


class _RefusalContent(RequestModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageContent(RequestModel):
    """A picture as a data URL; ids of uploaded pictures are not supported."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None
    file_id: Annotated[Any, only()] = None


_Texts = Annotated[
    Annotated[_TextContent | _RefusalContent, Field(discriminator="type")],
    known_type("content parts", "input_text", "output_text", "refusal"),
]
_Parts = Annotated[
    Annotated[_TextContent | _RefusalContent | ImageContent, Field(discriminator="type")],
    known_type("content parts", "input_text", "output_text", "refusal", "input_image"),
]


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "text"


_TEXT_OR_LIST = Discriminator(_kind)  # so that errors refer to the form that was sent

Output = Annotated[Annotated[str, Tag("text")] | Annotated[list[_Texts], Tag("list")], _TEXT_OR_LIST]
"""The result of a call, which may be empty."""

ContentParts = Annotated[
    Annotated[str, Tag("text")] | Annotated[Annotated[list[_Parts], Field(min_length=1)], Tag("list")],
    _TEXT_OR_LIST,
]


class MessageItem(RequestModel):
    """A message, written by a user or copied from an answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ContentParts
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Annotated[Any, only("final_answer")] = None


class CallItem(RequestModel):
    """A call that an answer requested."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None


class CallOutputItem(RequestModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Output
    id: ItemId | None = None
    status: ItemStatus | None = None


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """A thought, copied from an answer; the next item of the assistant belongs to the same message."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] | None = None
    summary: Annotated[Any, only([])] = None
    encrypted_content: Annotated[Any, only()] = None
    id: ItemId | None = None
    status: ItemStatus | None = None


def _type_of(item: Any) -> str:
    """Return the type of an item; the type of a message may be omitted."""
    return str(item.get("type") or "message") if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[CallItem, Tag("function_call")]
        | Annotated[CallOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_type_of),
    ],
    known_type("items", "message", "function_call", "function_call_output", "reasoning"),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
Input = Annotated[Annotated[str, Tag("text")] | Annotated[Items, Tag("list")], _TEXT_OR_LIST]


class FunctionTool(Function):
    """A function; unlike in OpenAI's API, its schema is enforced only if ``strict`` is true."""

    type: Literal["function"]


_Tool = Annotated[FunctionTool, known_type("tools", "function")]


class NamedFunctionTool(RequestModel):
    type: Literal["function"]
    name: str


class JsonSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


_Format = Annotated[
    Annotated[PlainFormat | JsonSchemaFormat, Field(discriminator="type")],
    known_type("formats", "text", "json_object", "json_schema"),
]


class TextConfig(RequestModel):
    format: _Format | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(RequestModel):
    effort: Effort | None = None
    summary: Annotated[Any, only()] = None
    generate_summary: Annotated[Any, only()] = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Annotated[Any, only(False)] = None


def _includable(value: Any) -> Any:
    if isinstance(value, list):
        for name in value:
            if isinstance(name, str) and name not in (LOGPROBS, _IGNORED_INCLUDE):
                raise PydanticCustomError(
                    "unsupported", "{value} is not supported by this server", {"value": repr(name[:80])}
                )
    return value


class ResponsesRequest(SamplingFields):
    """A request to the Responses API; chat's sampling fields are accepted in addition to OpenAI's."""

    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunctionTool | None, known_type("tool_choice", "function")
    ] = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=16), BeforeValidator(_includable)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None

    @model_validator(mode="after")
    def _validate_combinations(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise off("stream_options", "stream_options needs stream: true")
        if self.top_logprobs and not self.with_logprobs:
            raise off("top_logprobs", f"top_logprobs needs {LOGPROBS!r} in include")
        return self

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
