"""Build answers from events of the engine, as chunks of a stream or as one body."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gym_fed.serving.engine.request import Event, TokenLogprob
from gym_fed.serving.openai.logprobs import logprobs_of_chat, logprobs_of_completion
from gym_fed.serving.openai.tool_formats.base import AnswerPart, Call, CallParser, MoreArguments

StreamChunk = dict[str, Any]


class Shown(NamedTuple):
    """The parts of a choice that may be sent now, in order, ``reasoning`` first; calls may be in fragments."""

    parts: Sequence[AnswerPart]
    logprobs: Sequence[TokenLogprob]
    reasoning: str = ""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call | MoreArguments]:
        """The calls, the beginnings of calls, and further arguments of the last call."""
        return [part for part in self.parts if isinstance(part, Call | MoreArguments)]


@dataclass
class AnswerChoice:
    """The state of one choice of an answer; its thought is returned only if ``with_reasoning`` is True."""

    parser: CallParser | None = None
    text: str = ""
    reasoning: str = ""
    with_reasoning: bool = True
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """The log-probabilities of the tokens of ``text``."""

    num_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    _waiting: deque[TokenLogprob] = field(default_factory=deque)
    """Log-probabilities of tokens that may belong to a call."""

    def take(self, event: Event) -> Shown:
        """Add an event, and return the parts to send."""
        shown = self._shown(self._read(event))
        self._show(shown)
        if (reason := self._end_of(event)) is not None:
            self._finish(reason)
        return shown

    def _shown(self, read: Shown) -> Shown:
        """Drop the thought if the caller did not request it."""
        return read if self.with_reasoning else read._replace(reasoning="")

    def _end_of(self, event: Event) -> str | None:
        """Return the finish reason if this event ends the answer or completes its only allowed call, else None."""
        over = self.parser is not None and self.parser.is_over
        return event.finish_reason or ("stop" if over else None)

    def _read(self, event: Event) -> Shown:
        """Count an event's tokens, and split calls from text."""
        self.num_tokens += len(event.token_ids)
        self.reasoning_tokens += event.reasoning_tokens
        self.cached_tokens += event.cached_tokens
        if self.parser is None:
            return Shown([event.text] if event.text else [], event.logprobs, event.reasoning)
        parts = self.parser.feed(event.text)
        if event.finish_reason is not None:
            parts += self.parser.end(cut=event.finish_reason == "length")
        self._waiting += event.logprobs
        return Shown(parts, self._logprobs_of_text(self.parser), event.reasoning)

    def _logprobs_of_text(self, parser: CallParser) -> list[TokenLogprob]:
        """Return pending log-probabilities of tokens that belong to text, with offsets in the text without calls."""
        out = []
        while self._waiting and self._waiting[0].end <= parser.settled:
            token = self._waiting.popleft()
            if not any(start <= token.start < end for start, end in parser.calls_at):
                called = int(sum(end - start for start, end in parser.calls_at if end <= token.start))
                out.append(replace(token, start=token.start - called, end=token.end - called))
        return out

    def _show(self, shown: Shown) -> None:
        self.text += shown.text
        self.reasoning += shown.reasoning
        for part in shown.calls:
            if isinstance(part, Call):
                self.calls.append(part)
            else:
                last = self.calls[-1]
                self.calls[-1] = replace(last, arguments=last.arguments + part.text)
        self.logprobs += shown.logprobs

    def _finish(self, reason: str) -> None:
        self.finish_reason = "tool_calls" if self.calls and reason == "stop" else reason


class Answer(ABC):
    """All choices of one request.

    Args:
        model: The requested name.
        prompt_tokens: Tokens of all prompts, each counted once.
        choices: One per generation, in order.
        with_logprobs: True if log-probabilities were requested.
        include_usage: True if the stream ends with token counts.
        fingerprint: The identifier of the base's weights.
        per_prompt: The number of choices per prompt.

    Attributes:
        ends_with_done: True if a stream has the line ``[DONE]`` after its last chunk.
    """

    ends_with_done = True
    keeps = False
    """True if ``closing`` stores the answer, and may therefore block briefly."""

    _prefix: str
    _object: str
    _chunk_object: str

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        choices: list[AnswerChoice],
        *,
        with_logprobs: bool,
        include_usage: bool,
        fingerprint: str,
        per_prompt: int = 1,
    ) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self.with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._fingerprint = fingerprint
        self._per_prompt = per_prompt
        self.id = f"{self._prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thoughts, which are also counted in ``completion_tokens``."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """The number of cached prompt tokens, which none of a prompt's choices had to prefill."""
        counts = [choice.cached_tokens for choice in self.choices]
        starts = range(0, len(counts), self._per_prompt)
        return sum(min(counts[start : start + self._per_prompt]) for start in starts)

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def ended(self, index: int) -> bool:
        """Return True if a choice accepts no further events."""
        return self.choices[index].finish_reason is not None

    def body(self) -> dict[str, Any]:
        """Return the complete answer, after the last event."""
        choices = [self._choice_body(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(self._object), "choices": choices, "usage": self.usage()}

    @abstractmethod
    def opening(self) -> list[StreamChunk]:
        """Return the first chunks of a stream."""

    @abstractmethod
    def take(self, index: int, event: Event) -> list[StreamChunk]:
        """Add an event of a choice, and return its chunks."""

    def closing(self) -> list[StreamChunk]:
        """Return the last chunks of a stream: the token counts, if requested."""
        if not self._include_usage:
            return []
        return [{**self._head(self._chunk_object), "choices": [], "usage": self.usage()}]

    def failure(self, error: dict[str, Any]) -> StreamChunk:
        """Return the last chunk of a stream that fails, given the error in OpenAI's form."""
        return error

    @abstractmethod
    def _choice_body(self, index: int, choice: AnswerChoice) -> dict[str, Any]: ...

    def _chunk(self, choice: dict[str, Any]) -> StreamChunk:
        chunk = {**self._head(self._chunk_object), "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": self._fingerprint,
        }


class ChatAnswer(Answer):
    """An answer of ``/v1/chat/completions``.

    Args:
        model: See ``Answer``, also for arguments that are not listed here.
        metadata: The metadata of the request; returned with the answer.
        keep: Function that stores the complete answer under its id, and returns True if it did; None to not store
            answers.
    """

    _prefix = "chatcmpl"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        choices: list[AnswerChoice],
        *,
        metadata: dict[str, str] | None = None,
        keep: Callable[[str, dict[str, Any]], bool] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, prompt_tokens, choices, **more)
        self._metadata = metadata
        self._keep = keep
        self.keeps = keep is not None
        self._not_stored: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        body = {**super().body(), **self._not_stored}
        return body if self._metadata is None else {**body, "metadata": self._metadata}

    def closing(self) -> list[StreamChunk]:
        """Return the last chunks, which also report that an answer was too large to store."""
        last = super().closing()
        if self._keep is None or self._keep(self.id, self.body()):
            return last
        self._not_stored = {"store": False}
        return [{**chunk, **self._not_stored} for chunk in last or [self._delta(0, {})]]

    def opening(self) -> list[StreamChunk]:
        delta = {"role": "assistant", "content": ""}
        return [self._delta(index, delta) for index in range(len(self.choices))]

    def take(self, index: int, event: Event) -> list[StreamChunk]:
        choice = self.choices[index]
        earlier = len(choice.calls)
        shown = choice.take(event)
        text, calls, logprobs = shown.text, shown.calls, shown.logprobs
        chunks = []
        if shown.reasoning:
            chunks.append(self._delta(index, _thought(shown.reasoning)))
        if text or (logprobs and not calls and choice.finish_reason is None):
            chunks.append(self._delta(index, {"content": text}, logprobs))
            logprobs = ()
        number = earlier - 1
        for part in calls:
            number += isinstance(part, Call)
            more = part.to_dict() if isinstance(part, Call) else {"function": {"arguments": part.text}}
            delta = {"tool_calls": [{"index": number, **more}]}
            chunks.append(self._delta(index, delta, logprobs))
            logprobs = ()
        if choice.finish_reason is not None:
            chunks.append(self._delta(index, {}, logprobs, choice.finish_reason))
        return chunks

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Iterable[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> StreamChunk:
        shown = list(tokens)
        return self._chunk(
            {
                "index": index,
                "delta": delta,
                "logprobs": logprobs_of_chat(shown) if shown else None,
                "finish_reason": finish_reason,
            }
        )

    def _choice_body(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message |= _thought(choice.reasoning)
        if choice.reasoning_tokens:
            message["content"] = choice.text or None
        if choice.calls:
            message["content"] = choice.text.strip() or None
            message["tool_calls"] = [call.to_dict() for call in choice.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_of_chat(choice.logprobs) if self.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }


def _thought(text: str) -> dict[str, str]:
    """Return a thought under both of its field names: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


class CompletionAnswer(Answer):
    """An answer of ``/v1/completions``.

    Args:
        model: See ``Answer``, also for arguments that are not listed here.
        echoes: For each choice, the prompt's text to repeat before it; empty for none.
    """

    _prefix = "cmpl"
    _object = "text_completion"
    _chunk_object = "text_completion"

    def __init__(
        self, model: str, prompt_tokens: int, choices: list[AnswerChoice], *, echoes: list[str], **more: Any
    ) -> None:
        super().__init__(model, prompt_tokens, choices, **more)
        self._echoes = echoes

    def opening(self) -> list[StreamChunk]:
        return [self._text_chunk(index, text) for index, text in enumerate(self._echoes) if text]

    def take(self, index: int, event: Event) -> list[StreamChunk]:
        choice = self.choices[index]
        shown = choice.take(event)
        text, logprobs = shown.text, shown.logprobs
        if not text and not logprobs and choice.finish_reason is None:
            return []
        return [self._text_chunk(index, text, logprobs, choice.finish_reason)]

    def _text_chunk(
        self, index: int, text: str, tokens: Iterable[TokenLogprob] = (), finish_reason: str | None = None
    ) -> StreamChunk:
        shown = list(tokens)
        logprobs = logprobs_of_completion(shown) if shown else None
        return self._chunk(
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        )

    def _choice_body(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoes[index] + choice.text,
            "logprobs": logprobs_of_completion(choice.logprobs) if self.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
