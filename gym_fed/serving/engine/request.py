"""Requests to the engine, their events and results, and handles for answers and embeddings in progress.

The module does not import torch, since the API and the batch runner use it too.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from torch import Tensor

    from gym_fed.serving.forward.chunk import PlacedPicture
    from gym_fed.serving.reasoning.base import Thinking


FinishReason = Literal["stop", "length", "cancelled", "error"]
GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True)
class Grammar:
    """A grammar that constrains an answer token by token.

    Attributes:
        kind: ``json_schema``: a JSON value that the schema allows, an object if the schema is ``{}``. ``regex``: a text
            that matches the whole pattern. ``choice``: one of several texts. ``grammar``: a text of the grammar.
            ``calls``: text and tool calls, as ``gym_fed.serving.engine.guided`` describes them.
        text: The schema, the pattern, a JSON list of texts, or a grammar in Lark's notation or GBNF.
    """

    kind: GrammarKind
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions. The defaults are OpenAI's.

    Attributes:
        max_tokens: Maximum number of tokens of the answer; None: as many as the context has left.
        min_tokens: Minimum number of tokens of the answer before an end token or stop token id may end it.
        temperature: 0 is greedy.
        top_p: Total probability of the most likely tokens to sample from (nucleus sampling).
        top_k: Sample among the N most likely tokens; 0 = all.
        min_p: Sample among tokens at least this fraction as likely as the most likely one.
        presence_penalty: Subtracted once from the logit of each token that is already in the answer.
        frequency_penalty: Subtracted once for each occurrence of the token in the answer.
        repetition_penalty: Penalty on the logits of tokens in prompt and answer (Keskar et al. 2019); 1 means none.
        logit_bias: Added to the logits of these tokens.
        seed: Seed that makes sampling reproducible, independent of the rest of the batch; None: random. (In bfloat16,
            rounding may still change close decisions with a different batch size.)
        stop: Texts; the answer ends before the first occurrence of any. They may contain control tokens, even hidden
            ones.
        stop_token_ids: Token ids that end the answer, in addition to the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens (for measurements).
        logprobs: Number of most likely tokens to report log-probabilities for, plus the sampled token's; None: none.
        json_schema: JSON schema of the answer, as JSON text; ``{}`` allows any object.
        grammar: Grammar of the answer; not together with ``json_schema``.
        shown_token_ids: Control tokens whose text is part of the answer's text.
        skip_special_tokens: Whether to leave all other control tokens out of the answer's text.
        thinking: How the answer may think; None: it has no thought. ``stop``, ``stop_token_ids`` and grammars apply
            after the thought.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | None = None
    grammar: Grammar | None = None
    shown_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    thinking: Thinking | None = None

    @property
    def held_to(self) -> Grammar | None:
        """The given grammar, or that of ``json_schema``."""
        return self.grammar if self.json_schema is None else Grammar("json_schema", self.json_schema)


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer.

    Attributes:
        prompt_ids: The token ids of the prompt, at least one.
        sampling: The sampling parameters.
        variant: Name of a variant; None: the base.
        user: The user whose share its tokens count towards; the queue is fair between users, not between requests.
        cache_key: Prompt cache key; only requests with the same key share KV blocks.
        pictures: The pictures in the prompt, in order.
        key_digest: The digest of the user's API key; requests with different keys do not share KV blocks.
        request_id: The request's name in logs.
    """

    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    variant: str | None = None
    user: str = ""
    cache_key: str = ""
    pictures: tuple[PlacedPicture, ...] = ()
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    key_digest: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """One token and its natural-log probability before temperature and penalties."""

    token_id: int
    data: bytes
    """The UTF-8 bytes that it adds to the text, which may be only part of a character."""

    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    """The most likely tokens at the same position, most likely first: id, bytes, logprob."""

    start: int = 0
    """Number of characters of the answer before it; set in events."""

    end: int = 0
    """Number of characters up to its end, including one that it begins; set in events."""


@dataclass(frozen=True)
class Event:
    """A part of an answer: text that may be shown (no incomplete character or stop text), and its tokens.

    The last event has ``finish_reason``, and the ``cached_tokens`` of the prompt; its text may be empty.

    ``reasoning`` is text of the thought, and ``reasoning_tokens`` counts the ``token_ids`` that belong to it.
    ``logprobs`` are those of the answer's text, which their bytes form together. A thought, an end token, a removed
    stop text, and an incomplete character at the end have none.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    reasoning: str = ""
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """A complete answer.

    Attributes:
        text: The text, without end tokens, stop texts and the thought.
        token_ids: The sampled tokens, including the end token.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        logprobs: The log-probabilities, one per token, if requested.
        prompt_tokens: Length of the prompt.
        seconds_to_first_token: Seconds from submission to the first token.
        seconds: Seconds from submission to the end.
        cached_tokens: Number of tokens of the prompt that were in the prefix cache.
        reasoning: The text of the thought.
        reasoning_tokens: Number of tokens of the thought, including its marks.
        is_unfinished: True if it ended inside the thought.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    seconds_to_first_token: float
    seconds: float
    cached_tokens: int = 0
    reasoning: str = ""
    reasoning_tokens: int = 0
    is_unfinished: bool = False

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


_Waker = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class Generation:
    """An answer in progress. Events are stored until they are read, so a slow reader does not delay other requests.

    ``for event in generation`` or ``async for event in generation`` (one reader): the last event has a
    ``finish_reason``. If the answer fails, the iteration and ``result`` raise its ``GymError``.

    Attributes:
        request: The submitted request.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._on_cancel: Callable[[], None] | None = None  # set by the engine
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # used by the reader of events
        self._ended = threading.Condition(lock)  # used by ``result``, which is not woken by every token
        self._events: deque[Event] = deque()
        self._completion: CompletionOutput | None = None
        self._error: GymError | None = None
        self._error_raised = False  # set by the reader of events
        self._wakers: list[_Waker] = []

    @property
    def done(self) -> bool:
        return self._completion is not None or self._error is not None

    def cancel(self) -> None:
        """Cancel the answer, which then ends with ``cancelled`` within one step. May be called at any time."""
        if self._on_cancel is not None and not self.done:
            self._on_cancel()

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """Wait for the complete answer, whether or not its events are read.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (the answer continues).
        """
        with self._ended:
            if not self._ended.wait_for(lambda: self.done, timeout):
                raise GymError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"no complete answer within {timeout} s",
                    "increase the timeout",
                )
        return self._whole()

    async def result_async(self) -> CompletionOutput:
        """Like ``result``, without blocking the event loop."""
        await self._wait(lambda: self.done)
        return self._whole()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self.done)
            event = self._next()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        await self._wait(lambda: bool(self._events) or self.done)
        with self._changed:
            event = self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    def _next(self) -> Event | None:
        if self._events:
            return self._events.popleft()
        if self._error is not None and not self._error_raised:
            self._error_raised = True
            raise self._error
        return None

    def _whole(self) -> CompletionOutput:
        if self._error is not None:
            raise self._error
        assert self._completion is not None
        return self._completion

    async def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait until ``is_ready``, without blocking the event loop."""
        while True:
            waker = (asyncio.get_running_loop(), asyncio.Event())
            with self._changed:
                if is_ready():
                    return
                self._wakers.append(waker)
            try:
                await waker[1].wait()
            finally:
                with self._changed:
                    if waker in self._wakers:
                        self._wakers.remove(waker)

    # Called by the engine.

    def _put(self, event: Event, completion: CompletionOutput | None = None) -> None:
        with self._changed:
            if self.done:
                return
            self._events.append(event)
            self._completion = completion
            wakers = self._wake()
        _set(wakers)

    def _fail(self, error: GymError) -> None:
        with self._changed:
            if self.done:
                return
            self._error = error
            wakers = self._wake()
        _set(wakers)

    def _wake(self) -> list[_Waker]:
        self._changed.notify_all()
        if self.done:
            self._ended.notify_all()
        wakers, self._wakers = self._wakers, []
        return wakers


def _set(wakers: list[_Waker]) -> None:
    for loop, waker in wakers:
        try:
            loop.call_soon_threadsafe(waker.set)
        except RuntimeError:  # its event loop is closed, so the reader is gone
            continue


class PendingEmbedding:
    """An embedding in progress: ``[hidden] float32``, the normalised mean of the text's last hidden states.

    Args:
        future: The future that the engine completes; cancelling it cancels the request.
    """

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Cancel the embedding, which frees its slot within one step. May be called at any time."""
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Tensor:
        """Wait for the embedding.

        Raises:
            GymError: Why it failed; ``DEADLINE_EXCEEDED`` after ``timeout`` seconds (it continues);
                ``UNAVAILABLE`` if it was cancelled.
        """
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED, f"no embedding within {timeout} s", "increase the timeout"
            ) from None
        except CancelledError:
            raise _cancelled() from None

    async def result_async(self) -> Tensor:
        """Like ``result``, without blocking the event loop. Cancelling the awaiting task cancels the embedding."""
        waiting = asyncio.wrap_future(self._future)
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self.cancel()
                raise
            raise _cancelled() from None


def _cancelled() -> GymError:
    return GymError(ErrorCode.UNAVAILABLE, "the embedding was cancelled", "request it again")
