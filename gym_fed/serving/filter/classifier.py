"""A yes-or-no classifier of texts that runs on the served model or one of its variants.

The verdict is ``p(yes) / (p(yes) + p(no))`` of the first token of the answer: two requests of one token, each with that
token forced, whose log-probability the engine reports before forcing. They are batched with everything else, so
there is no second model in memory. The question goes through the chat template, in which no text can end its message.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_fed.config.content_filter import ClassifierConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import CompletionOutput, Event, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from gym_fed.serving.engine.engine import Engine
    from gym_fed.serving.engine.generation import Generation

_FORCED = 1000.0
"""The highest bias that the engine accepts: far beyond any logit."""
_SECONDS = 60.0


class Classifier:
    """Judges whole texts; from any thread.

    Args:
        config: The question, the variant that answers it, and the probability from which a text is refused.
        engine: Generates the answer.
        render: Returns the token ids of the question as a user's message, up to where the answer begins.
        yes: The first token of the answer ``yes``.
        no: The first token of the answer ``no``.

    Raises:
        GymError: ``CONFIG_INVALID`` if both answers begin with the same token, or if a test question cannot be
            answered.
    """

    def __init__(
        self, config: ClassifierConfig, engine: Engine, render: Callable[[str], list[int]], yes: int, no: int
    ) -> None:
        if yes == no:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "filter.classifier: 'yes' and 'no' begin with the same token of this model",
                "serve another base, or remove filter.classifier",
            )
        self.category = config.category
        self._config = config
        self._engine = engine
        self._render = render
        self._answers = yes, no
        try:
            self.ask("hello", "").probability()
        except GymError as error:
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"filter.classifier: {error.message}", error.hint
            ) from error

    def ask(self, text: str, user: str) -> Verdict:
        """Ask about a text, without waiting for the answer.

        Args:
            text: The whole text.
            user: The user whose place in the queue it takes.

        Raises:
            GymError: ``TOO_LARGE`` for a text that leaves no room for the question; ``BUSY``; ``UNAVAILABLE`` if the
                model cannot answer.
        """
        with _errors():
            return self._ask(text, user)

    def _ask(self, text: str, user: str) -> Verdict:
        ids = self._render(self._config.question.replace("{text}", text))
        started: list[Generation] = []
        try:
            for token in self._answers:
                sampling = SamplingParams(
                    max_tokens=1, temperature=0.0, logprobs=0, logit_bias={token: _FORCED}, ignore_eos=True
                )
                started.append(
                    self._engine.submit(GenerationRequest(ids, sampling, self._config.variant, user))
                )
        except BaseException:
            for generation in started:
                generation.cancel()
            raise
        return Verdict(started[0], started[1], self._config.threshold)


class Verdict:
    """A pending verdict."""

    def __init__(self, yes: Generation, no: Generation, threshold: float) -> None:
        self._both = yes, no
        self._threshold = threshold

    def probability(self) -> float:
        """Return the probability of yes.

        Raises:
            GymError: ``UNAVAILABLE`` if it failed or was cancelled, ``DEADLINE_EXCEEDED`` after a minute.
        """
        try:
            with _errors():
                yes, no = (generation.result(_SECONDS) for generation in self._both)
        finally:
            self._cancel()
        return _share(yes, no)

    def refuses(self) -> bool:
        """Return whether the text must be refused; raises as ``probability``."""
        return self.probability() >= self._threshold

    async def refuses_async(self) -> bool:
        """Like ``refuses``, without blocking the event loop."""
        try:
            with _errors():
                yes, no = [await generation.result_async() for generation in self._both]
        finally:
            self._cancel()
        return _share(yes, no) >= self._threshold

    def _cancel(self) -> None:
        for generation in self._both:
            generation.cancel()  # no effect on one that has ended


_PASSED = (ErrorCode.TOO_LARGE, ErrorCode.BUSY, ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)


@contextmanager
def _errors() -> Iterator[None]:
    """Translate errors to the filter's: the caller did not ask for this model."""
    try:
        yield
    except GymError as error:
        code = error.code if error.code in _PASSED else ErrorCode.UNAVAILABLE
        raise GymError(
            code, f"the content filter's question was not answered: {error.message}", error.hint
        ) from error


def _share(yes: CompletionOutput, no: CompletionOutput) -> float:
    if not (yes.logprobs and no.logprobs):
        raise GymError(ErrorCode.UNAVAILABLE, "the filter's question was cancelled", "request it again")
    return 1 / (1 + math.exp(min(700.0, no.logprobs[0].logprob - yes.logprobs[0].logprob)))


@dataclass(frozen=True)
class RefusedEvent(Event):
    """The only event of an answer that the classifier refused."""

    category: str = ""


class JudgedGeneration:
    """An answer whose events all wait until the classifier has judged its text.

    Args:
        generation: The answer.
        classifier: Asked once the answer has ended.
        user: The user whose place in the queue the question takes.
    """

    def __init__(self, generation: Generation, classifier: Classifier, user: str) -> None:
        self._generation = generation
        self._classifier = classifier
        self._user = user

    def __iter__(self) -> Iterator[Event]:
        events = list(self._generation)
        yield from self._judged(events, _has_text(events) and self._ask(events).refuses())

    async def __aiter__(self) -> AsyncIterator[Event]:
        events = [event async for event in self._generation]
        refused = _has_text(events) and await self._ask(events).refuses_async()
        for event in self._judged(events, refused):
            yield event

    def cancel(self) -> None:
        self._generation.cancel()

    def _ask(self, events: list[Event]) -> Verdict:
        return self._classifier.ask("".join(event.text for event in events), self._user)

    def _judged(self, events: list[Event], refused: bool) -> list[Event]:
        if not refused:
            return events
        token_ids = tuple(token for event in events for token in event.token_ids)
        cached = sum(event.cached_tokens for event in events)
        return [RefusedEvent("", token_ids, (), "stop", cached, self._classifier.category)]


def _has_text(events: list[Event]) -> bool:
    """Return whether there is text to judge: an answer that failed or was cancelled is not shown."""
    return events[-1].finish_reason in ("stop", "length") and any(event.text for event in events)
