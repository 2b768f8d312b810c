"""A Responses request as the chat request that answers it: there is one path to the engine, and it is chat's.

A refusal names a field of chat; ``ResponsesAsChat.errors`` gives it the name of the field that the caller wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.serving.openai.fields import SamplingFields, parse
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses_request import (
    CallItem,
    CallOutputItem,
    ContentParts,
    ImageContent,
    JsonSchemaFormat,
    MessageItem,
    NamedFunctionTool,
    Output,
    ResponsesRequest,
)
from gym_fed.serving.openai.schemas import CHAT_NEUTRAL, ChatRequest

ChatMessage = dict[str, Any]

_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Fields of chat by the names that they have here."""
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_PART = re.compile(r"\.content\[\d+\]")
"""A picture's, which has the same number here."""
_TOOL_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


class ResponsesAsChat:
    """One request and the conversation that it goes on with.

    Args:
        request: As it came.
        earlier: The conversation before it, of ``previous_response_id``.

    Attributes:
        messages: The conversation with the request's input; ``instructions`` are not of it, and count once.
    """

    def __init__(self, request: ResponsesRequest, earlier: list[ChatMessage]) -> None:
        self.messages = list(earlier)
        self._request = request
        self._origins = ["previous_response_id"] * len(earlier)
        if isinstance(request.input, str):
            self._add({"role": "user", "content": request.input}, "input")
        else:
            for index, item in enumerate(request.input):
                self._add_item(item, f"input[{index}]")

    def chat(self) -> ChatRequest:
        """The chat request.

        Raises:
            RequestError: About one of this API's fields.
        """
        with self.errors():
            return parse(ChatRequest, self._body(), CHAT_NEUTRAL)

    def _body(self) -> dict[str, Any]:
        request = self._request
        own = {name: getattr(request, name) for name in SamplingFields.model_fields}
        found = {
            **own,
            "messages": [*self._instructions(), *self.messages],
            "max_completion_tokens": request.max_output_tokens,
            "logprobs": request.with_logprobs or None,
            "top_logprobs": request.top_logprobs if request.with_logprobs else None,
            "response_format": self._format(),
            "reasoning_effort": request.reasoning and request.reasoning.effort,
            "verbosity": request.text and request.text.verbosity,
            "chat_template_kwargs": request.chat_template_kwargs,
            "tools": self._tools(),
            "tool_choice": self._choice(),
            "parallel_tool_calls": request.parallel_tool_calls if request.tools else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Name the request's own fields in what is refused within."""
        try:
            yield
        except RequestError as error:
            if (renamed := self.renamed(error)) is error:
                raise
            raise renamed from error

    def renamed(self, error: GymError) -> GymError:
        """The error, about the field that the caller wrote."""
        if not isinstance(error, RequestError) or error.param is None:
            return error
        param = self._param(error.param)
        if param == error.param:
            return error
        message = error.message.replace(repr(error.param), repr(param))
        return RequestError(message, param=param, name=error.name, code=error.code, hint=error.hint)

    def _param(self, param: str) -> str:
        if (found := _MESSAGE.match(param)) is not None:
            index = int(found[1]) - len(self._instructions())
            part = _PART.match(param[found.end() :])
            where = part[0] if part else ""
            return "instructions" if index < 0 else f"{self._origins[index]}{where}"
        first, _, more = _TOOL_FUNCTION.sub(r"\1", param).partition(".")
        first = _FIELDS.get(first, first)
        if first == "text.format":
            return f"text.format.{more.removeprefix('json_schema.')}".rstrip(".")
        return f"{first}.{more}" if more else first

    def _instructions(self) -> list[ChatMessage]:
        given = self._request.instructions
        return [{"role": "system", "content": given}] if given else []

    def _add(self, message: ChatMessage, origin: str) -> None:
        self.messages.append(message)
        self._origins.append(origin)

    def _add_item(self, item: MessageItem | CallItem | CallOutputItem, origin: str) -> None:
        if isinstance(item, MessageItem):
            self._add({"role": item.role, "content": _content(item.content)}, origin)
        elif isinstance(item, CallOutputItem):
            message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            self._add(message, origin)
        else:
            self._add_call(item, origin)

    def _add_call(self, item: CallItem, origin: str) -> None:
        """Calls after an assistant's text, or after each other, are of one message, as templates expect them."""
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": None, "tool_calls": [call]}, origin)
            return
        last = self.messages[-1]
        self.messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}

    def _format(self) -> dict[str, Any] | None:
        given = self._request.text.format if self._request.text else None
        if given is None:
            return None
        if not isinstance(given, JsonSchemaFormat):
            return {"type": given.type}
        schema = given.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}

    def _tools(self) -> list[dict[str, Any]] | None:
        return [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in self._request.tools or ()
        ] or None

    def _choice(self) -> Any:
        choice = self._request.tool_choice
        if choice == "auto" and not self._request.tools:  # as OpenAI's clients of agents send it
            return None
        if isinstance(choice, NamedFunctionTool):
            return {"type": "function", "function": {"name": choice.name}}
        return choice


def _content(content: ContentParts) -> str | list[dict[str, Any]]:
    """A text, or parts in their order where pictures are among them."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, ImageContent) for part in content):
        return "".join(part.text for part in content if not isinstance(part, ImageContent))
    return [
        {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        if isinstance(part, ImageContent)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _text(content: Output) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
