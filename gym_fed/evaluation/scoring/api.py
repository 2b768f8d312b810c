"""Scoring through an OpenAI-compatible server: answers, and log-likelihoods if the server returns those of prompts.

The server has the tokenizer and the chat template. On the client, characters are used as tokens (``Characters``), and
complete texts are sent; a conversation stays a list of messages for ``/v1/chat/completions``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.scoring.scorer import AnswerRequest, AnswerResult, Continuation, Loglikelihood
from gym_fed.serving.chat.remote_writer import RemoteWriter
from gym_fed.serving.reasoning.base import joined
from gym_fed.serving.reasoning.parsers._tags import CLOSE, OPEN, TagSplitter

MAX_LENGTH = 1 << 30
"""Unlimited: the server knows its model's context and refuses longer prompts."""
_MAX_CONCURRENT = 8
_ROUNDING = 1e-3
"""Tolerance in nats for log-probabilities above 0."""
_RETRY_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, *[10.0] * 18)
_CONVERSATION = "messages: "
_T = TypeVar("_T")


class Characters:
    """A tokenizer stand-in that treats every character as a token."""

    chat_template = "of the server"
    bos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the code points."""
        return [ord(character) for character in text]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Return the text of code points."""
        if ids is None:
            return ""
        return "".join(map(chr, [ids] if isinstance(ids, int) else ids))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> str:
        """Return the messages as a text that ``_messages_of`` can parse."""
        return _CONVERSATION + json.dumps(list(messages), ensure_ascii=False)


def _messages_of(prompt: str) -> list[Any] | None:
    """Return the messages of a prompt that is a conversation; None for a text."""
    if not prompt.startswith(_CONVERSATION):
        return None
    try:
        messages = json.loads(prompt.removeprefix(_CONVERSATION))
    except (ValueError, RecursionError):
        return None
    is_conversation = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return messages if is_conversation else None


class ApiScorer:
    """A ``Scorer`` of one model behind ``/v1/completions``.

    Args:
        url: The server's URL, with or without ``/v1``.
        model: The server's name for the model; empty for the only base that it serves.
        api_key: API key, which is sent as a bearer token.

    Raises:
        GymError: ``UNAVAILABLE``, ``UNAUTHENTICATED``, or ``NOT_FOUND`` for a model that the server does not list.
    """

    def __init__(self, url: str, model: str, *, api_key: str | None = None) -> None:
        self._writer = RemoteWriter(url, model or None, api_key=api_key)
        self.model = self._writer.base
        self.models: tuple[str, ...] = (self.model,)
        self.tokenizer: Any = Characters()
        self.max_length = MAX_LENGTH
        self._url = url
        self._separates_thoughts = False
        """True once the server has returned a thought in a separate field. Any other server may apply stop texts inside
        a thought, so they are not sent to it in conversations."""

    def close(self) -> None:
        self._writer.close()

    def only(self, models: Sequence[str]) -> None:
        """Do nothing: there is a single model; see ``Scorer``."""
        assert tuple(models) == self.models

    def require_loglikelihoods(self, tasks: Sequence[str]) -> None:
        """Check that the server returns the log-probabilities of a prompt.

        Raises:
            GymError: ``UNAVAILABLE`` naming the tasks that need them.
        """
        try:
            self._score(Continuation((ord("a"),), (ord(" "), ord("b"))))
        except GymError as error:
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"{self._url} returns no log-probabilities of a prompt (echo with logprobs: {error.message}), "
                f"which these tasks need: {', '.join(tasks)}",
                "omit them, or evaluate the model's folder",
            ) from error

    def loglikelihoods(
        self, continuations: Sequence[Continuation], done: Collection[int] = ()
    ) -> Iterator[tuple[int, Mapping[str, Loglikelihood]]]:
        """See ``Scorer``."""
        places = [place for place in range(len(continuations)) if place not in done]
        for number, result in _each(self._score, [continuations[place] for place in places]):
            yield places[number], {self.model: result}

    def answers(self, prompts: Sequence[AnswerRequest]) -> Iterator[tuple[int, Mapping[str, AnswerResult]]]:
        """See ``Scorer``. The API returns texts without tokens: ``token_ids`` and ``margins`` are empty."""
        for place, result in _each(self._answer, prompts):
            yield place, {self.model: result}

    def _score(self, continuation: Continuation) -> Loglikelihood:
        context = self.tokenizer.decode(continuation.context_ids)
        if context.startswith(_CONVERSATION):
            raise GymError(
                ErrorCode.UNAVAILABLE,
                f"{self._url}: servers return no log-probabilities of an answer in a conversation",
                "pass --no-chat-template, omit the task, or evaluate the model's folder",
            )
        text = context + self.tokenizer.decode(continuation.continuation_ids)
        body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        choice = self._writer.complete({"model": self.model, **body})
        try:
            given = choice["logprobs"]
            places, logprobs, tops = given["text_offset"], given["token_logprobs"], given["top_logprobs"]
            scored = [at for at, place in enumerate(places) if len(context) <= place < len(text)]
            values = [float(logprobs[at]) for at in scored]
            greedy = all(values[n] >= max(map(float, tops[at].values())) for n, at in enumerate(scored))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise GymError(ErrorCode.UNAVAILABLE, "the answer has no logprobs of its prompt") from error
        if not values:
            raise GymError(ErrorCode.UNAVAILABLE, "the answer does not include the prompt")
        if not all(value <= _ROUNDING for value in values):  # also excludes NaN
            raise GymError(ErrorCode.UNAVAILABLE, "the answer has logprobs that are above 0 or not numbers")
        return Loglikelihood(sum(values), greedy)

    def _answer(self, request: AnswerRequest) -> AnswerResult:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        until = [stop for stop in request.until if stop]
        prompt, thought, inside = self.tokenizer.decode(request.prompt_ids), "", False
        messages = _messages_of(prompt)
        if until and (messages is None or self._separates_thoughts):
            body["stop"] = until[:4]  # OpenAI's limit; further stop texts are applied here
        if messages is not None:
            choice = self._writer.complete({**body, "messages": messages}, "chat/completions")
            message = choice.get("message")
            if not isinstance(message, Mapping):
                raise GymError(ErrorCode.UNAVAILABLE, f"{self._url}: the answer has no message")
            text = str(message.get("content") or "")
            thought = str(message.get("reasoning_content") or message.get("reasoning") or "")
            if thought:
                self._separates_thoughts = True
            else:  # a server without a parser returns the tags, or only the second one if the prompt has the first
                opened = OPEN not in text.partition(CLOSE)[0] and CLOSE in text
                splitter = TagSplitter({}, (OPEN, CLOSE), opened=opened)
                thought, text = joined([splitter.feed(text), splitter.end()])
                inside = splitter.thinking
        else:
            choice = self._writer.complete({**body, "prompt": prompt})
            text = str(choice.get("text", ""))
        reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        unfinished = inside or (bool(thought) and not text and reason == "length")
        for stop in until:
            text, separator, _ = text.partition(stop)
            reason = "stop" if separator else reason
        return AnswerResult(text, (), reason, thought=thought, is_unfinished=unfinished)


def _when_free(ask: Callable[[Any], _T], request: Any) -> _T:
    """Retry for some minutes while the server reports too many requests."""
    for seconds in (*_RETRY_SECONDS, None):
        try:
            return ask(request)
        except GymError as error:
            if error.code is not ErrorCode.BUSY or seconds is None:
                raise
            time.sleep(seconds)
    raise AssertionError("the last attempt returns or raises")


def _each(ask: Callable[[Any], _T], requests: Sequence[Any]) -> Iterator[tuple[int, _T]]:
    """Run several calls concurrently and yield each result when it is done."""
    waiting = iter(enumerate(requests))
    pending: dict[Future[_T], int] = {}
    with ThreadPoolExecutor(_MAX_CONCURRENT, thread_name_prefix="gym-eval") as pool:
        try:
            while True:
                while len(pending) < _MAX_CONCURRENT and (following := next(waiting, None)) is not None:
                    pending[pool.submit(_when_free, ask, following[1])] = following[0]
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield pending.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
