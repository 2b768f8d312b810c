"""The schemas of ``POST /v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gym_fed.serving.engine.request import Grammar
from gym_fed.serving.openai.content_types import AudioPart, ImagePart, TextPart, VideoPart
from gym_fed.serving.openai.fields import (
    NEUTRAL,
    Neutral,
    PromptEndFields,
    RequestModel,
    TemplateVariables,
    known_type,
    not_supported,
    off,
    only,
)
from gym_fed.serving.openai.guided_fields import GuidedFields, ResponseFormat, SchemaFormat


def _parts_only(*kinds: str) -> BeforeValidator:
    """Refuse content parts of types other than ``kinds``, such as files, with an error that names the type."""

    def check(value: Any) -> Any:
        if isinstance(value, list):
            for part in value:
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind not in kinds:
                    raise not_supported("content parts", kind, *kinds)
        return value

    return BeforeValidator(check)


_FORM = Discriminator(lambda value: "parts" if isinstance(value, list) else "string")
"""A discriminator, so that errors refer to the form that the client sent."""

Parts = Annotated[list[TextPart], Field(min_length=1)]
Content = Annotated[
    Annotated[Annotated[str, Tag("string")] | Annotated[Parts, Tag("parts")], _FORM], _parts_only("text")
]
Part = Annotated[TextPart | ImagePart | AudioPart | VideoPart, Field(discriminator="type")]
UserParts = Annotated[list[Part], Field(min_length=1)]
UserContent = Annotated[
    Annotated[Annotated[str, Tag("string")] | Annotated[UserParts, Tag("parts")], _FORM],
    _parts_only("text", "image_url", "input_audio", "video_url"),
]
Nothing = Annotated[Any, only([])]


def _refusals_as_text(value: Any) -> Any:
    """Convert a refusal in an earlier answer's content to text of the model."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "text", "text": part["refusal"]}
        if isinstance(part, dict) and part.keys() == {"type", "refusal"} and part["type"] == "refusal"
        else part
        for part in value
    ]


AssistantContent = Annotated[Content, BeforeValidator(_refusals_as_text)]


MAX_ARGUMENT_MARKS = 2**18
"""Maximum number of brackets and commas in the arguments of a call: as a string, they pass the limit on the values of a
body, and parsing them holds the GIL."""


def _json_object(text: str) -> str:
    if sum(map(text.count, "{[,")) > MAX_ARGUMENT_MARKS:
        raise PydanticCustomError("arguments", "arguments of a tool call have too many values")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("arguments", "arguments of a tool call are not JSON") from error
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "arguments of a tool call are not a JSON object")
    return text


class FunctionCall(RequestModel):
    name: str
    arguments: Annotated[
        str, BeforeValidator(lambda text: "{}" if text == "" else text), AfterValidator(_json_object)
    ]
    """JSON text; some servers write an empty string for a call without arguments."""


class ToolCall(RequestModel):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: Annotated[int, Field(ge=0)] | None = None
    """The call's index in a stream, which clients such as Open WebUI send back; ignored, since the order implies it."""


class _Message(RequestModel):
    name: Annotated[str, Field(max_length=256)] | None = None
    """The name of one of several speakers, which templates do not render."""


class InstructionMessage(_Message):
    """A system message; ``developer`` is the newer name for ``system``."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: UserContent


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: AssistantContent | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    """The model's reasoning, which is rendered if the chat template reads it by this name, as Qwen3's does."""

    reasoning: str | None = None
    """vLLM's newer name for ``reasoning_content``."""

    refusal: Nothing = None
    audio: Nothing = None
    annotations: Nothing = None
    function_call: Nothing = None

    @model_validator(mode="after")
    def _validate_content(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise off("content", "an assistant message needs content or tool_calls")
        if None not in (self.reasoning_content, self.reasoning) and self.reasoning != self.reasoning_content:
            raise off("reasoning", "reasoning and reasoning_content differ")
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def text_of(content: str | Sequence[Part] | None, marks: Mapping[str, str] = MappingProxyType({})) -> str:
    """Join the parts of a message, with the mark of its type for each part that is not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else marks.get(part.type, "") for part in content)


MAX_MESSAGES = 4096
MAX_TOOLS = 128

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
Budget = Annotated[int, Field(ge=0, lt=2**31)]

CHAT_NEUTRAL: Neutral = {
    **NEUTRAL,
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "echo": (False,),
    "mm_processor_kwargs": (),
}


class Function(RequestModel):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True if calls must follow ``parameters`` even if ``tool_choice`` does not require one."""


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


_Tool = Annotated[Tool, known_type("tools", "function")]


class NamedFunction(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(PromptEndFields, GuidedFields):
    """The messages of a conversation."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None, known_type("tool_choice", "function")
    ] = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    """True to store the answer for a while, so that it can be read again by its id."""

    reasoning_effort: Effort | None = None
    """A template variable, like the next two fields; refused if the template does not have it."""

    verbosity: Verbosity | None = None
    chat_template_kwargs: TemplateVariables | None = None
    """A field of vLLM."""

    include_reasoning: bool | None = None
    """A field of vLLM; false leaves the thought out of the answer."""

    thinking_token_budget: Budget | None = None
    """Maximum number of tokens of the thought, which is then closed. vLLM's field; SGLang and Qwen use
    ``thinking_budget``."""

    thinking_budget: Budget | None = None

    @model_validator(mode="after")
    def _validate_combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise off("top_logprobs", "top_logprobs needs logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise off("max_tokens", "max_tokens and max_completion_tokens differ")
        if None not in (self.thinking_token_budget, self.thinking_budget) and (
            self.thinking_token_budget != self.thinking_budget
        ):
            raise off("thinking_budget", "thinking_token_budget and thinking_budget differ")
        if not self.tools and self.tool_choice not in (None, "none"):
            raise off("tool_choice", "tool_choice needs tools")
        if not self.tools and self.parallel_tool_calls is not None:
            raise off("parallel_tool_calls", "parallel_tool_calls needs tools")
        names = [tool.function.name for tool in self.tools or []]
        if len(names) != len(set(names)):
            raise off("tools", "two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise off("tool_choice", f"{self.tool_choice.function.name!r} is not in tools")
        if self.tools and self.tool_choice != "none" and self.guided is not None:
            field = self.guided[0]
            raise off(field, f"{field} and tools cannot be enforced at once: send only one of them")
        self._require_enforceable()
        self._require_known_calls()
        return self

    def _require_enforceable(self) -> None:
        required = self.tool_choice not in (None, "auto", "none")
        strict = self.tool_choice != "none" and any(tool.function.strict for tool in self.tools or [])
        if required or strict:
            self.require_no_stops()

    def _require_known_calls(self) -> None:
        unanswered: dict[str, int] = {}  # calls without a result yet, by id
        for index, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage):
                unanswered |= Counter(call.id for call in message.tool_calls or [])
            if not isinstance(message, ToolMessage):
                continue
            if not unanswered.get(message.tool_call_id):
                known = message.tool_call_id in unanswered
                raise off(
                    f"messages[{index}].tool_call_id",
                    f"tool_call_id {message.tool_call_id!r} matches no earlier call"
                    + (" without a result" if known else ""),
                )
            unanswered[message.tool_call_id] -= 1

    @property
    def continued(self) -> str | None:
        """The text that the answer continues; None for a new message."""
        return text_of(self.messages[-1].content) or None if self.continue_final_message else None

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def budget(self) -> int | None:
        return self.thinking_budget if self.thinking_token_budget is None else self.thinking_token_budget

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def _given(self) -> list[tuple[str, Grammar]]:
        grammars = super()._given()
        if self.response_format is None or self.response_format.type == "text":
            return grammars
        schema = (
            self.response_format.json_schema.schema_ if isinstance(self.response_format, SchemaFormat) else {}
        )
        return [("response_format", Grammar("json_schema", json.dumps(schema))), *grammars]


MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions; the answer to a chat may be as long as the context."""

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
ManyTokenIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


def _kind(value: Any) -> str | None:
    """Return which of the four forms an input has, so that errors refer to that form; None if it has none of them."""
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first = value[0] if value else ""
    return "texts" if isinstance(first, str) else "many" if isinstance(first, list) else "ids"


Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[ManyTokenIds, Tag("many")],
    Discriminator(
        _kind,
        custom_error_type="inputs",
        custom_error_message="Input should be a text, token ids, or a list of either",
    ),
]

COMPLETION_NEUTRAL: Neutral = {**NEUTRAL, "store": (False,), "suffix": (), "best_of": (1,)}


class CompletionRequest(GuidedFields):
    """Texts to continue; several are answered together."""

    prompt: Inputs
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _validate_combinations(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise off("echo", "echo with logprobs is not supported: the prompt's logprobs are not computed")
        if len(as_list(self.prompt)) * (self.n or 1) > MAX_PROMPTS:
            raise off("n", f"prompts times n is more than {MAX_PROMPTS}")
        return self


class EmbeddingRequest(RequestModel):
    """Texts to embed."""

    model: str = Field(max_length=256)
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Number of leading values of the vector to return, normalised again."""

    user: Annotated[str, Field(max_length=256)] | None = None


def as_list(inputs: Inputs) -> list[str] | list[list[int]]:
    """Convert one or several inputs to a list of texts or of token ids."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs[0], int):
        return [[int(token) for token in inputs if isinstance(token, int)]]
    return inputs  # the schema has checked that all are of one kind
