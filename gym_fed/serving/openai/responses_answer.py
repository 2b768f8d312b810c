"""The answers of ``/v1/responses``: output items, and the stream of events that builds them.

The reasoning, if there is any, is the first item. Text and calls become items in the order in which the model wrote
them. White space next to a call is dropped.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gym_fed.serving.engine.request import TokenLogprob
from gym_fed.serving.openai.answers import Answer, AnswerChoice, StreamChunk
from gym_fed.serving.openai.logprobs import logprobs_of_chat
from gym_fed.serving.openai.responses_request import NamedFunctionTool, ResponsesRequest
from gym_fed.serving.openai.tool_formats.base import AnswerPart, Call, CallEnd

Item = dict[str, Any]

_ARGUMENTS = "response.function_call_arguments"

_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The reasons in ``incomplete_details``, by ``finish_reason``."""

Keep = Callable[[str, dict[str, Any], list[dict[str, Any]]], bool]
"""A function of an answer's id, body and messages; returns True if they are stored."""


class ResponsesAnswer(Answer):
    """A response with one choice.

    Args:
        model: See ``Answer``, which documents the arguments that are not listed here.
        request: The request, whose settings are returned with the response.
        keep_response: Function that stores the complete answer; None to store nothing.
    """

    _prefix = "resp"
    ends_with_done = False

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        choices: list[AnswerChoice],
        *,
        request: ResponsesRequest,
        keep_response: Keep | None,
        **more: Any,
    ) -> None:
        super().__init__(model, prompt_tokens, choices, **more)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._settings = _settings_of(request)
        self._keep_response = keep_response
        self._stored = self.keeps = keep_response is not None
        self._number = 0
        self._items: list[Item] = []
        self._message: Item | None = None
        self._call: Item | None = None
        self._thought: Item | None = None
        self._texts: list[str] = []
        self._text_logprobs: list[dict[str, Any]] = []
        self._blank = ""
        self._logprobs: deque[TokenLogprob] = deque()
        self._num_characters = 0  # length of the text parts so far
        self._body: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        assert self._body is not None, "it is created by the last chunk"
        return self._body

    def opening(self) -> list[StreamChunk]:
        response = self._response("in_progress")
        return [self._event(f"response.{state}", response=response) for state in ("created", "in_progress")]

    def take(self, index: int, event: Any) -> list[StreamChunk]:
        choice = self.choices[index]
        shown = choice.take(event)
        self._logprobs += shown.logprobs
        chunks = self._reasoning(shown.reasoning) if shown.reasoning else []
        for part in shown.parts:
            chunks += self._part(part)
        if choice.finish_reason is not None:
            chunks += self._end(choice)
        return chunks

    def closing(self) -> list[StreamChunk]:
        (choice,) = self.choices
        reason = _REASONS.get(choice.finish_reason or "")
        status = "completed" if reason is None else "incomplete"
        response = self._response(status, reason, usage=self._counts())
        streamed = {**response, "output": self._items}
        full = {**response, "output": self._refused(choice) if reason == "content_filter" else self._items}
        if self._keep_response is not None and not self._keep_response(self.id, full, _messages(full)):
            streamed["store"] = full["store"] = self._stored = False
        self._body = full
        return [self._event(f"response.{status}", response=streamed)]

    def failure(self, error: dict[str, Any]) -> StreamChunk:
        fields = error["error"]
        number = self._number
        self._end_thought("incomplete")
        self._end_message("incomplete")
        self._end_call("incomplete")
        self._number = number  # the events that end these items are not sent
        code = "rate_limit_exceeded" if fields["type"] == "rate_limit_error" else "server_error"
        response = {
            **self._response("failed"),
            "output": self._items,
            "error": {"code": code, "message": fields["message"]},
        }
        return self._event("response.failed", response=response)

    def _counts(self) -> dict[str, Any]:
        """Return the token counts under this API's names."""
        counts = self.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }

    def _choice_body(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
        raise NotImplementedError("a response has items, not choices")

    def _response(
        self, status: str, reason: str | None = None, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": False,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self.model,
            "output": [],
            "store": self._stored,
            "usage": usage,
            **self._settings,
        }

    def _event(self, kind: str, **data: Any) -> StreamChunk:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return event

    def _part(self, part: AnswerPart) -> list[StreamChunk]:
        if isinstance(part, str):
            return self._text(part)
        if isinstance(part, Call):
            return self._begin_call(part)
        return self._end_call("completed") if isinstance(part, CallEnd) else [self._arguments(part.text)]

    def _reasoning(self, text: str) -> list[StreamChunk]:
        """Add reasoning text."""
        before: list[StreamChunk] = []
        if self._thought is None:
            ended = [*self._end_message("completed"), *self._end_call("completed")]
            self._texts = []
            self._thought = {
                "id": f"rs_{secrets.token_hex(24)}",
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            before = [*ended, *self._added(self._thought, _reasoning_part(""))]
        self._texts.append(text)
        place = self._place_of(self._thought)
        return [*before, self._event("response.reasoning_text.delta", **place, delta=text)]

    def _end_thought(self, status: str) -> list[StreamChunk]:
        if self._thought is None:
            return []
        part, place = _reasoning_part("".join(self._texts)), self._place_of(self._thought)
        self._thought |= {"status": status, "content": [part]}
        thought, self._thought = self._thought, None
        done = self._event("response.reasoning_text.done", **place, text=part["text"])
        return [done, *self._done(thought, place, part)]

    def _text(self, text: str) -> list[StreamChunk]:
        """Add visible text; white space is held back, since it is dropped next to a call."""
        self._num_characters += len(text)
        if self._message is None:
            self._blank += text
            if not self._blank.strip():
                return []
            text, self._blank = self._blank, ""
            return [*self._end_call("completed"), *self._begin_message(), self._delta(text)]
        return [self._delta(text)]

    def _begin_message(self) -> list[StreamChunk]:
        self._message = {
            "id": f"msg_{secrets.token_hex(24)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        ended = self._end_thought("completed")
        self._texts, self._text_logprobs = [], []
        return [*ended, *self._added(self._message, _text_part("", []))]

    def _added(self, item: Item, part: dict[str, Any]) -> list[StreamChunk]:
        """Append an item, and return the events that begin it."""
        self._items.append(item)
        place = self._place_of(item)
        return [
            self._event("response.output_item.added", output_index=place["output_index"], item=dict(item)),
            self._event("response.content_part.added", **place, part=part),
        ]

    def _done(self, item: Item, place: dict[str, Any], part: dict[str, Any]) -> list[StreamChunk]:
        return [
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=place["output_index"], item=item),
        ]

    def _place_of(self, item: Item) -> dict[str, Any]:
        """Return the fields that locate the content of the last item."""
        return {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _delta(self, text: str) -> StreamChunk:
        assert self._message is not None
        place = self._place_of(self._message)
        logprobs = logprobs_of_chat(self._take_logprobs())["content"]
        self._texts.append(text)
        self._text_logprobs += logprobs
        return self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _take_logprobs(self) -> list[TokenLogprob]:
        """Return the log-probabilities of the text so far that were not returned before."""
        taken = []
        while self._logprobs and self._logprobs[0].start < self._num_characters:
            taken.append(self._logprobs.popleft())
        return taken

    def _end_message(self, status: str) -> list[StreamChunk]:
        if self._message is None:
            if self._blank:
                self._take_logprobs()  # drop the log-probabilities of the white space
            self._blank = ""
            return []
        place = self._place_of(self._message)
        part = _text_part("".join(self._texts), self._text_logprobs)
        self._message |= {"status": status, "content": [part]}
        message, self._message = self._message, None
        return [
            self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]),
            *self._done(message, place, part),
        ]

    def _begin_call(self, call: Call) -> list[StreamChunk]:
        before = [
            *self._end_thought("completed"),
            *self._end_message("completed"),
            *self._end_call("completed"),
        ]
        self._call = {
            "id": f"fc_{secrets.token_hex(24)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._texts = []
        self._items.append(self._call)
        index = len(self._items) - 1
        added = self._event("response.output_item.added", output_index=index, item=dict(self._call))
        if not call.arguments:
            return [*before, added]
        return [*before, added, self._arguments(call.arguments), *self._end_call("completed")]

    def _arguments(self, text: str) -> StreamChunk:
        """Add arguments to the open call."""
        self._texts.append(text)
        return self._event(f"{_ARGUMENTS}.delta", **self._place_of_call(), delta=text)

    def _place_of_call(self) -> dict[str, Any]:
        assert self._call is not None
        return {"item_id": self._call["id"], "output_index": len(self._items) - 1}

    def _end_call(self, status: str) -> list[StreamChunk]:
        if self._call is None:
            return []
        place = self._place_of_call()
        arguments = "".join(self._texts)
        self._call |= {"status": "completed" if _is_json(arguments) else status, "arguments": arguments}
        call, self._call = self._call, None
        named = {"name": call["name"], "arguments": call["arguments"]}
        return [
            self._event(f"{_ARGUMENTS}.done", **place, **named),
            self._event("response.output_item.done", output_index=place["output_index"], item=call),
        ]

    def _end(self, choice: AnswerChoice) -> list[StreamChunk]:
        """End the last item; an answer without items becomes an empty message."""
        blank, self._blank = self._blank, ""
        status = "incomplete" if choice.finish_reason in _REASONS else "completed"
        chunks = self._end_thought(status) if self._items else self._begin_message()
        if self._message is not None and blank:
            chunks.append(self._delta(blank))
        return [*chunks, *self._end_message(status), *self._end_call(status)]

    def _refused(self, choice: AnswerChoice) -> list[Item]:
        """Return the items of a refused answer: only the refusal, even if other text was already streamed."""
        head = next(item for item in reversed(self._items) if item["type"] == "message")
        return [{**head, "content": [_text_part(choice.text, [])]}]


def _settings_of(request: ResponsesRequest) -> dict[str, Any]:
    """Return the settings of a request for its response; fields that were not given have their defaults."""
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    choice = request.tool_choice
    effort = request.reasoning.effort if request.reasoning else None
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunctionTool) else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _is_json(text: str) -> bool:
    """Return True if a call's arguments are complete; no proper prefix of an object is valid JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chat messages that the answer adds to the conversation, without a call that was cut off."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls = []
    for item in body["output"]:
        if item["type"] == "reasoning":
            earlier = [message["reasoning_content"]] if "reasoning_content" in message else []
            message["reasoning_content"] = "\n".join([*earlier, item["content"][0]["text"]])
        elif item["type"] == "message":
            message["content"] = (message["content"] or "") + item["content"][0]["text"]
        elif item["status"] == "completed":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
    return [{**message, "tool_calls": calls} if calls else {**message, "content": message["content"] or ""}]
