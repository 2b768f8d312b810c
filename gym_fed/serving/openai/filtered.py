"""Choices under the content filter: one whose text is held back, and one whose request was refused."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence

from gym_fed.serving.engine.request import Event, TokenLogprob
from gym_fed.serving.filter.content_filter import ContentFilter, texts_in
from gym_fed.serving.filter.held_text import HeldText
from gym_fed.serving.openai.answers import AnswerChoice, Shown
from gym_fed.serving.openai.tools import Call, FreeCalls, RequiredCall

CONTENT_FILTER = "content_filter"
"""OpenAI's ``finish_reason`` of an answer that a filter ended."""

_NOTHING = Shown("", (), ())


class FilteredChoice(AnswerChoice):
    """Sends what no rule can match any more; where one matches, the refusal's text in place of the rest.

    Log-probabilities wait for the text of their tokens, and calls for the end of the answer.

    Args:
        content_filter: Supplies the refusal's text, and counts it.
        held: Of this answer.
        parser: See ``AnswerChoice``.
    """

    def __init__(
        self, content_filter: ContentFilter, held: HeldText, parser: FreeCalls | RequiredCall | None = None
    ) -> None:
        super().__init__(parser)
        self._filter = content_filter
        self._held = held
        self._calls: list[Call] = []
        self._logprobs: deque[TokenLogprob] = deque()
        self._shown = 0  # characters that left
        self._logged = 0  # characters of the tokens whose log-probabilities left

    def take(self, event: Event) -> Shown:
        if self.finish_reason is not None:
            return _NOTHING
        last = event.finish_reason is not None
        text, calls, logprobs = self._read(event)
        self._calls += calls
        self._logprobs += logprobs
        text = self._held.push(text, last=last)
        category = self._held.category or self._category_of(calls)
        if category is not None:
            return self._refuse(category)
        self._shown += len(text)
        shown = Shown(text, self._calls if last else (), self._logprobs_of_shown(last))
        self._show(shown)
        if event.finish_reason is not None:
            self._finish(event.finish_reason)
        return shown

    def _category_of(self, calls: Sequence[Call]) -> str | None:
        texts = (text for call in calls for text in (call.name, *texts_in(json.loads(call.arguments))))
        return next(filter(None, map(self._filter.category_of, texts)), None)

    def _logprobs_of_shown(self, everything: bool) -> list[TokenLogprob]:
        out: list[TokenLogprob] = []
        while self._logprobs and (everything or self._logged + len(self._logprobs[0].text) <= self._shown):
            out.append(self._logprobs.popleft())
            self._logged += len(out[-1].text)
        return out

    def _refuse(self, category: str) -> Shown:
        """The whole answer is the refusal; a stream that has begun goes on with it after an empty line."""
        self._filter.count("output", category)
        begun = bool(self.text)
        self.text, self.calls, self.logprobs = self._filter.text, [], []
        self._finish(CONTENT_FILTER)
        return Shown(f"\n\n{self.text}" if begun else self.text, (), ())


class RefusedChoice(AnswerChoice):
    """Answers a refused request."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._refusal = text

    def take(self, event: Event) -> Shown:
        shown = Shown(self._refusal, (), ())
        self._show(shown)
        self._finish(CONTENT_FILTER)
        return shown
