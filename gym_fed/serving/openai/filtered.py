"""Apply the content filter to requests and answers: refuse requests, and hold back the text of choices."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gym_fed.serving.engine.request import Event, TokenLogprob
from gym_fed.serving.filter.content_filter import (
    Classifier,
    ContentFilter,
    HeldText,
    JudgedGeneration,
    RefusedEvent,
    texts_in,
)
from gym_fed.serving.openai.answers import AnswerChoice, Shown
from gym_fed.serving.openai.tool_formats.base import AnswerPart, Call, CallParser

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import Generation

CONTENT_FILTER = "content_filter"
"""OpenAI's ``finish_reason`` of an answer that a filter ended."""


class Screening:
    """Applies a content filter to the requests of one service.

    Args:
        content_filter: The rules.
        classifier: The classifier that the filter's config names; None if it names none.
    """

    def __init__(self, content_filter: ContentFilter, classifier: Classifier | None) -> None:
        self._filter = content_filter
        self._classifier = classifier

    def refuses(self, texts: Iterable[str], user: str) -> bool:
        """Return True if a request must be refused for its texts. Waits for the classifier; counts and logs refusals.

        Raises:
            GymError: Errors from ``Classifier.ask`` and ``Verdict.refuses``.
        """
        compared = list(texts)
        category = self._filter.category_of("input", compared)
        judge = self._classifier if self._filter.classifies("input") else None
        if category is None and judge is not None and judge.ask("\n\n".join(compared), user).refuses():
            category = judge.category
        if category is not None:
            self._filter.count("input", category)
        return category is not None

    def refusals(self, number: int) -> list[AnswerChoice]:
        """Return the choices of a refused request."""
        return [RefusedChoice(self._filter.config.text) for _ in range(number)]

    def choice(self, parser: CallParser | None, before: str) -> AnswerChoice:
        """Create a choice of an answer that continues the text ``before``."""
        held = self._filter.held_text(before)
        return AnswerChoice(parser) if held is None else FilteredChoice(self._filter, held, parser)

    def judged(self, generations: list[Generation], user: str) -> list[Generation] | list[JudgedGeneration]:
        """Wrap the answers so that the classifier judges them, if it is configured for output."""
        if self._classifier is None or not self._filter.classifies("output"):
            return generations
        return [JudgedGeneration(generation, self._classifier, user) for generation in generations]


class FilteredChoice(AnswerChoice):
    """Releases text once no rule can match it any more; on a match, sends the text of the refusal instead of the rest.

    Log-probabilities are held back with the text of their tokens, and tool calls until the end of the answer.

    Args:
        content_filter: The filter, with the refusal's text and the counts of refusals.
        held: The ``HeldText`` of this answer.
        parser: See ``AnswerChoice``.
    """

    def __init__(
        self, content_filter: ContentFilter, held: HeldText, parser: CallParser | None = None
    ) -> None:
        super().__init__(parser)
        self._filter = content_filter
        self._held, self._held_thought = held, content_filter.held_text("")
        self._calls: list[Call] = []
        self._logprobs: deque[TokenLogprob] = deque()
        self._num_shown = 0  # characters sent

    def take(self, event: Event) -> Shown:
        read = self._read(event)
        reason = self._end_of(event)
        last = reason is not None
        # the parser of a filtered answer returns only complete calls
        calls = [call for call in read.calls if isinstance(call, Call)]
        self._calls += calls
        self._logprobs += read.logprobs
        thought = self._thought(read, last=last)
        text = self._held.push(read.text, last=last)
        category = self._held.category or self._category_of(calls)
        if self._held_thought is not None:
            category = category or self._held_thought.category
        if isinstance(event, RefusedEvent):
            category = event.category
        if category is not None:
            return self._refuse(category)
        self._num_shown += len(text)
        parts: list[AnswerPart] = [text] if text else []
        calls_now = self._calls if last else ()
        shown = self._shown(Shown([*parts, *calls_now], self._logprobs_of_shown(last), thought))
        self._show(shown)
        if reason is not None:
            self._finish(reason)
        return shown

    def _thought(self, read: Shown, *, last: bool) -> str:
        """Return the part of the thought that may be shown: all of it once the answer begins."""
        held = self._held_thought
        if held is None:
            return read.reasoning
        ends = last or bool(read.parts)
        thought = held.push(read.reasoning, last=ends)
        if ends and held.category is None:
            self._held_thought = self._filter.held_text("")  # another thought may follow
        return thought

    def _category_of(self, calls: Sequence[Call]) -> str | None:
        texts = (text for call in calls for text in (call.name, *texts_in(json.loads(call.arguments))))
        return self._filter.category_of("output", texts)

    def _logprobs_of_shown(self, everything: bool) -> list[TokenLogprob]:
        out: list[TokenLogprob] = []
        while self._logprobs and (everything or self._logprobs[0].end <= self._num_shown):
            out.append(self._logprobs.popleft())
        return out

    def _refuse(self, category: str) -> Shown:
        """Replace the answer with the refusal; in a stream that has begun, it follows after an empty line."""
        self._filter.count("output", category)
        begun = bool(self.text)
        self.text, self.reasoning = self._filter.config.text, ""
        self.calls, self.logprobs = [], []
        self._finish(CONTENT_FILTER)
        return Shown([f"\n\n{self.text}" if begun else self.text], ())


class RefusedChoice(AnswerChoice):
    """A choice that answers a refused request."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._refusal = text

    def take(self, event: Event) -> Shown:
        shown = Shown([self._refusal], ())
        self._show(shown)
        self._finish(CONTENT_FILTER)
        return shown
