"""Translate the Responses API to chat requests, and store responses that later requests may continue."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.serving.openai.answers import Answer
from gym_fed.serving.openai.catalogue import LOCAL, Caller
from gym_fed.serving.openai.fields import SamplingFields, parse, unsupported
from gym_fed.serving.openai.pending import Pending
from gym_fed.serving.openai.refusals import RequestError, unsupported_parameter
from gym_fed.serving.openai.responses_answer import Keep, ResponsesAnswer
from gym_fed.serving.openai.responses_request import (
    RESPONSES_NEUTRAL,
    CallItem,
    CallOutputItem,
    ContentParts,
    ImageContent,
    JsonSchemaFormat,
    MessageItem,
    NamedFunctionTool,
    Output,
    ReasoningItem,
    ResponsesRequest,
)
from gym_fed.serving.openai.schemas import CHAT_NEUTRAL, ChatRequest
from gym_fed.serving.openai.stored_answers import StoredAnswers

RESPONSES = "/v1/responses"
MAX_CONVERSATION_BYTES = 2**20
"""Maximum size of a stored conversation in bytes, so that a small request cannot make the server process a huge
prompt."""


@dataclass(frozen=True)
class ChatForm:
    """The differences between the APIs whose requests are answered as chat requests.

    Attributes:
        url: The kind of request, for the usage log.
        answer: Function that creates the answer; called like ``Answer``.
        renamed: Function that translates field names in an error to the caller's API.
        truncate: True if the oldest turns of a conversation that is too long are dropped.
    """

    url: str
    answer: Callable[..., Answer]
    renamed: Callable[[GymError], GymError] = lambda error: error
    truncate: bool = False


Chat = Callable[[ChatRequest, Caller, ChatForm], Pending]


def begin_response(
    body: Any, caller: Caller, chat: Chat, stored: StoredAnswers | None, defaults: Mapping[str, Any]
) -> Pending:
    """Accept a request to the Responses API.

    Args:
        body: The parsed JSON.
        caller: The authenticated user.
        chat: Function that accepts the translated chat request.
        stored: The store of responses, for earlier ones and this one; None: responses are not stored.
        defaults: The defaults of sampling fields that were not given.

    Raises:
        GymError: Errors from ``OpenAIService.handle``; ``NOT_FOUND`` for a ``previous_response_id`` that is not stored.
    """
    request = parse(ResponsesRequest, body, RESPONSES_NEUTRAL).filled(defaults)
    as_chat = ResponsesAsChat(request, earlier_turns(request.previous_response_id, caller, stored))
    keeping = store_of(request.store, stored, default=True)
    keep = None if keeping is None else _keep(keeping, caller, as_chat)
    form = ChatForm(
        RESPONSES,
        partial(ResponsesAnswer, request=request, keep_response=keep),
        as_chat.renamed,
        request.truncation == "auto",
    )
    with as_chat.errors():
        return chat(as_chat.chat(), caller, form)


def check_response(body: Any) -> None:
    """Refuse an invalid body, whether or not responses are stored. Raises the errors of ``begin_response``."""
    request = parse(ResponsesRequest, body, RESPONSES_NEUTRAL)
    store_of(request.store, None, default=True)
    ResponsesAsChat(request, earlier_turns(request.previous_response_id, LOCAL, None)).chat()


def store_of(requested: bool | None, stored: StoredAnswers | None, *, default: bool) -> StoredAnswers | None:
    """Return the store for an answer; None if the request's ``store`` says not to store it.

    Raises:
        RequestError: If the answer must be stored, and the server stores no answers.
    """
    if requested and stored is None:
        raise unsupported_parameter(
            "store",
            "field 'store': this server does not store answers",
            "omit it; a server stores answers unless stored_answers.bytes_per_key is 0",
        )
    return stored if (default if requested is None else requested) else None


def earlier_turns(previous: str | None, caller: Caller, stored: StoredAnswers | None) -> list[dict[str, Any]]:
    """Return the conversation that ends with a stored response. Raises the errors of ``StoredAnswers.get``."""
    if previous is None:
        return []
    if stored is None:
        raise unsupported_parameter(
            "previous_response_id",
            "field 'previous_response_id': this server does not store answers",
            "send the conversation as input",
        )
    return stored.get(caller, previous, "resp_", "previous_response_id").conversation()


def _keep(stored: StoredAnswers, caller: Caller, as_chat: ResponsesAsChat) -> Keep | None:
    before = json.dumps(as_chat.messages, ensure_ascii=False)  # encode it here, on a thread that may block
    if len(before.encode()) > MAX_CONVERSATION_BYTES:
        return None

    def keep(answer_id: str, body: dict[str, Any], answer: list[dict[str, Any]]) -> bool:
        after = json.dumps(answer, ensure_ascii=False)
        return stored.put(caller, answer_id, body, f"{before[:-1]}, {after[1:]}")

    return keep


_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


def input_items(answer_id: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items before a response, including those of earlier responses that it continues.

    Args:
        answer_id: The id of the response; the ids of its items derive from it.
        messages: The stored conversation, whose last message is the answer.
    """
    items = [item for message in messages[:-1] for item in _items(message)]
    name = answer_id.removeprefix("resp_")
    return [
        {"id": f"item_{name}_{number}", **item, "status": "completed"} for number, item in enumerate(items)
    ]


def page_of(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a list, with OpenAI's pagination.

    Args:
        items: All items, oldest first.
        query: The request's ``limit``, ``order`` and ``after``.

    Raises:
        RequestError: For an invalid value, or an unknown field.
    """
    for name in query:
        if name not in ("limit", "order", "after"):
            raise unsupported(name[:80])
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise RequestError("field 'order' must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LIMIT):
        raise RequestError(f"field 'limit' must be a number from 1 to {_MAX_LIMIT}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise RequestError("field 'after' is not an item of this response", param="after")
        ordered = ordered[place + 1 :]
    data = ordered[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > len(data),
    }


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if role == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": content}
        return
    if message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "summary": [], "content": [thought]}
    if content:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield {"type": "message", "role": role, "content": [_part(part, role) for part in parts]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part["type"] == "image_url":
        picture = part["image_url"]
        return {
            "type": "input_image",
            "image_url": picture["url"],
            "detail": picture.get("detail") or "auto",
            "file_id": None,
        }
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": []}
    return {"type": "input_text", "text": part["text"]}


ChatMessage = dict[str, Any]

_FIELDS = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""The names of the chat fields in this API."""
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_PART = re.compile(r"\.content\[\d+\]")
"""Pattern of the position of a picture in its message; the index of the message is the same in both APIs."""
_TOOL_FUNCTION = re.compile(r"(tools\[\d+\])\.function")


class ResponsesAsChat:
    """A request and the conversation that it continues, translated to a chat request.

    Args:
        request: The validated request.
        earlier: The conversation of ``previous_response_id``.

    Attributes:
        messages: The conversation with the request's input, without ``instructions``, which apply to only one request.
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
        """Return the chat request.

        Raises:
            RequestError: With the field's name in this API.
        """
        with self.errors():
            return parse(ChatRequest, self._body(), CHAT_NEUTRAL)

    def _body(self) -> dict[str, Any]:
        request = self._request
        own = {name: getattr(request, name) for name in SamplingFields.model_fields}
        body = {
            **own,
            "messages": [*self._instructions(), *self.messages],
            "max_completion_tokens": request.max_output_tokens,
            "logprobs": request.with_logprobs or None,
            "top_logprobs": request.top_logprobs if request.with_logprobs else None,
            "response_format": self._format(),
            "reasoning_effort": request.reasoning and request.reasoning.effort,
            "verbosity": request.text and request.text.verbosity,
            "chat_template_kwargs": request.chat_template_kwargs,
            "include_reasoning": request.include_reasoning,
            "thinking_token_budget": request.thinking_token_budget,
            "thinking_budget": request.thinking_budget,
            "tools": self._tools(),
            "tool_choice": self._choice(),
            "parallel_tool_calls": request.parallel_tool_calls if request.tools else None,
        }
        return {name: value for name, value in body.items() if value is not None}

    @contextmanager
    def errors(self) -> Iterator[None]:
        """In errors raised inside the block, replace the field's name with that in the caller's request."""
        try:
            yield
        except RequestError as error:
            if (renamed := self.renamed(error)) is error:
                raise
            raise renamed from error

    def renamed(self, error: GymError) -> GymError:
        """Return the error with the field's name in the caller's request."""
        if not isinstance(error, RequestError) or error.param is None:
            return error
        param = self._param(error.param)
        if param == error.param:
            return error
        message = error.message.replace(repr(error.param), repr(param))
        return RequestError(message, param=param, name=error.name, code=error.code, hint=error.hint)

    def _param(self, param: str) -> str:
        if (match := _MESSAGE.match(param)) is not None:
            index = int(match[1]) - len(self._instructions())
            part = _PART.match(param[match.end() :])
            where = part[0] if part else ""
            return "instructions" if index < 0 else f"{self._origins[index]}{where}"
        first, _, more = _TOOL_FUNCTION.sub(r"\1", param).partition(".")
        first = _FIELDS.get(first, first)
        if first == "text.format":
            return f"text.format.{more.removeprefix('json_schema.')}".rstrip(".")
        return f"{first}.{more}" if more else first

    def _instructions(self) -> list[ChatMessage]:
        instructions = self._request.instructions
        return [{"role": "system", "content": instructions}] if instructions else []

    def _add(self, message: ChatMessage, origin: str) -> None:
        self.messages.append(message)
        self._origins.append(origin)

    def _add_item(self, item: MessageItem | CallItem | CallOutputItem | ReasoningItem, origin: str) -> None:
        if isinstance(item, MessageItem):
            message = {"role": item.role, "content": _content(item.content)}
            if item.role == "assistant" and self._ends_with_thought:
                self.messages[-1] |= message
            else:
                self._add(message, origin)
        elif isinstance(item, ReasoningItem):
            if thought := "".join(part.text for part in item.content or ()):
                self._add({"role": "assistant", "content": "", "reasoning_content": thought}, origin)
        elif isinstance(item, CallOutputItem):
            message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            self._add(message, origin)
        else:
            self._add_call(item, origin)

    @property
    def _ends_with_thought(self) -> bool:
        """True if the last message is a thought whose answer has not been added."""
        last = self.messages[-1] if self.messages else {}
        return bool(last.get("reasoning_content")) and not last["content"] and "tool_calls" not in last

    def _add_call(self, item: CallItem, origin: str) -> None:
        """Add a call to the message of the assistant's preceding text or calls, as templates expect."""
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": None, "tool_calls": [call]}, origin)
            return
        last = self.messages[-1]
        self.messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}

    def _format(self) -> dict[str, Any] | None:
        form = self._request.text.format if self._request.text else None
        if form is None:
            return None
        if not isinstance(form, JsonSchemaFormat):
            return {"type": form.type}
        schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}

    def _tools(self) -> list[dict[str, Any]] | None:
        return [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in self._request.tools or ()
        ] or None

    def _choice(self) -> Any:
        choice = self._request.tool_choice
        if choice == "auto" and not self._request.tools:  # OpenAI's agent clients send this
            return None
        if isinstance(choice, NamedFunctionTool):
            return {"type": "function", "function": {"name": choice.name}}
        return choice


def _content(content: ContentParts) -> str | list[dict[str, Any]]:
    """Return the text; with pictures, the parts in order."""
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
