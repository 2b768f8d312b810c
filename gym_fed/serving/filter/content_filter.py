"""Filter the content of requests and answers with rules, and with a classifier on the served model.

Logs and counts never contain a text. The classifier's verdict is ``p(yes) / (p(yes) + p(no))`` of the answer's first
token. It takes two requests of one token. Each forces one of these tokens, and the engine reports the log-probability
before forcing. They are batched with all other requests, so no second model is in memory.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gym_fed.config.serving import ClassifierConfig, FilterConfig, Side
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.engine.request import CompletionOutput, Event, GenerationRequest, SamplingParams
from gym_fed.serving.filter.rules import FOLDS, PACKAGE_RULES, Rules, fold, read_rules

if TYPE_CHECKING:
    from gym_fed.serving.engine.request import Generation
    from gym_fed.serving.engines.base import ServingEngine


_log = logging.getLogger(__name__)


Direction = Literal["input", "output"]


@dataclass(frozen=True)
class _Filtered:
    """The rules for one direction, and whether the classifier judges it."""

    rules: Rules
    classified: bool


class ContentFilter:
    """Refuses requests and answers by rules. Thread-safe.

    Args:
        config: A config with ``input`` or ``output`` on.

    Attributes:
        config: The given config.

    Raises:
        GymError: Errors from ``read_rules``; ``CONFIG_INVALID`` for a category without a rule or classifier.
    """

    def __init__(self, config: FilterConfig) -> None:
        self.config = config
        rules = read_rules([*([PACKAGE_RULES] if config.package_rules else []), *config.rules])
        sides: tuple[tuple[Direction, Side], ...] = (("input", config.input), ("output", config.output))
        self._on = {key: self._chosen(rules, side, key) for key, side in sides if side}
        self._lock = threading.Lock()
        self._refused: Counter[tuple[Direction, str]] = Counter()

    def classifies(self, direction: Direction) -> bool:
        """Return True if the classifier judges this direction, after the rules."""
        return direction in self._on and self._on[direction].classified

    def category_of(self, direction: Direction, texts: Iterable[str]) -> str | None:
        """Return the category of the first rule that refuses one of these texts; None if none does."""
        if direction not in self._on:
            return None
        categories = map(self._on[direction].rules.find, texts)
        return next((category for category in categories if category is not None), None)

    def held_text(self, before: str = "") -> HeldText | None:
        """Return the ``HeldText`` for an answer that continues a text; None if answers are not filtered."""
        return HeldText(self._on["output"].rules, before) if "output" in self._on else None

    def count(self, direction: Direction, category: str) -> None:
        """Count and log a refusal."""
        _log.warning("content filter: %s refused, category %s", direction, category)
        with self._lock:
            self._refused[direction, category] += 1

    def refused(self) -> dict[tuple[Direction, str], int]:
        """Return the number of refusals by direction and category, including zeros."""
        counts = {(key, name): 0 for key, side in self._on.items() for name in self._categories(side)}
        with self._lock:
            return {**counts, **self._refused}

    def _chosen(self, rules: Rules, side: Side, key: Direction) -> _Filtered:
        own = self.config.classifier
        if isinstance(side, bool):
            return _Filtered(rules, own is not None)
        known = [*rules.categories, *([] if own is None else [own.category])]
        for name in side:
            if name not in known:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"filter.{key}: no rule has the category {name!r}",
                    f"known categories: {', '.join(known)}",
                )
        return _Filtered(rules.of(side), own is not None and own.category in side)

    def _categories(self, side: _Filtered) -> list[str]:
        own = self.config.classifier
        return [*side.rules.categories, *([own.category] if own is not None and side.classified else [])]


def texts_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


class HeldText:
    """Holds back the end of a growing answer until no rule can match it, however the answer is split into chunks.

    A match has at most ``width`` folded characters, so text further from the end cannot be part of a later match. A
    match that touches the end waits for the next character, which may continue the word.

    Args:
        rules: The rules to match.
        before: The text that the answer continues: a match may begin in it, but not end in it.

    Attributes:
        category: The category of the rule that matched; nothing is released afterwards.
    """

    def __init__(self, rules: Rules, before: str = "") -> None:
        self.category: str | None = None
        self._rules = rules
        self._width = rules.width
        context = fold(before)[-self._width - 1 :]
        self._folded = context
        self._starts = [0] * len(context)  # position in ``_text`` of the source of each folded character
        self._context = len(context)  # number of folded characters already released
        self._begins = 0  # first position at which a match may begin; earlier ones have been searched
        self._text = ""

    def push(self, text: str, *, last: bool = False) -> str:
        """Add text, and return the text that may be shown; with ``last``, this is all of it unless a rule matches."""
        if self.category is not None:
            return ""
        if not self._width:
            return text
        self._take(text)
        size = len(self._folded)
        until = size if last else size - 1
        self.category = self._rules.find_within(self._folded, self._begins, self._context, until)
        if self.category is not None:
            self._text = ""
            return ""
        if last:
            out, self._text = self._text, ""
            return out
        return self._release(size - self._width)

    def _take(self, text: str) -> None:
        folded, blank = [self._folded], self._folded.endswith(" ")
        for place, character in enumerate(text, len(self._text)):
            for letter in FOLDS[ord(character)]:
                if letter == " " and blank:
                    continue
                blank = letter == " "
                folded.append(letter)
                self._starts.append(place)
        self._text += text
        self._folded = "".join(folded)

    def _release(self, count: int) -> str:
        """Release the text of the first ``count`` folded characters, the last of which stays as context."""
        while 0 < count < len(self._starts) and self._starts[count] == self._starts[count - 1]:
            count -= 1  # do not split a character that folds to several
        if count <= self._context:
            return ""
        cut = self._starts[count]
        out, self._text = self._text[:cut], self._text[cut:]
        self._folded = self._folded[count - 1 :]
        self._starts = [max(0, place - cut) for place in self._starts[count - 1 :]]
        self._context = self._begins = 1
        return out


_FORCED = 1000.0
"""A logit bias that forces a token, the highest that the engine accepts."""
_SECONDS = 60.0


class Classifier:
    """Judges complete texts. Thread-safe.

    Args:
        config: The question, the variant that answers it, and the threshold of refusal.
        engine: The engine that generates the answer.
        render: Function that renders the question as a user's message, up to the start of the answer, and returns token
            ids.
        yes: The first token of the answer ``yes``.
        no: The first token of the answer ``no``.

    Raises:
        GymError: ``CONFIG_INVALID`` if both answers begin with the same token, or if a test question cannot be
            answered.
    """

    def __init__(
        self,
        config: ClassifierConfig,
        engine: ServingEngine,
        render: Callable[[str], list[int]],
        yes: int,
        no: int,
    ) -> None:
        if yes == no:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                "filter.classifier: 'yes' and 'no' begin with the same token in this model's tokenizer",
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
            text: The complete text.
            user: The user in whose queue it waits.

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
            GymError: ``UNAVAILABLE`` if the question failed or was cancelled, ``DEADLINE_EXCEEDED`` after a minute.
        """
        try:
            with _errors():
                yes, no = (generation.result(_SECONDS) for generation in self._both)
        finally:
            self._cancel()
        return _share(yes, no)

    def refuses(self) -> bool:
        """Return True if the text must be refused. Raises the errors of ``probability``."""
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
    """Translate the engine's errors to errors of the filter, since the caller did not request this model."""
    try:
        yield
    except GymError as error:
        code = error.code if error.code in _PASSED else ErrorCode.UNAVAILABLE
        raise GymError(
            code, f"the content filter's classifier did not answer: {error.message}", error.hint
        ) from error


def _share(yes: CompletionOutput, no: CompletionOutput) -> float:
    if not (yes.logprobs and no.logprobs):
        raise GymError(
            ErrorCode.UNAVAILABLE,
            "the content filter's classification was cancelled",
            "send the request again",
        )
    return 1 / (1 + math.exp(min(700.0, no.logprobs[0].logprob - yes.logprobs[0].logprob)))


@dataclass(frozen=True)
class RefusedEvent(Event):
    """The single event of an answer that the classifier refused."""

    category: str = ""


class JudgedGeneration:
    """An answer whose events are held back until the classifier has judged its text.

    Args:
        generation: The answer.
        classifier: The classifier, which is asked after the answer has ended.
        user: The user in whose queue the question waits.
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
        texts = ("".join(event.reasoning for event in events), "".join(event.text for event in events))
        return self._classifier.ask("\n\n".join(filter(None, texts)), self._user)

    def _judged(self, events: list[Event], refused: bool) -> list[Event]:
        if not refused:
            return events
        token_ids = tuple(token for event in events for token in event.token_ids)
        return [
            RefusedEvent(
                "",
                token_ids,
                finish_reason="stop",
                cached_tokens=sum(event.cached_tokens for event in events),
                reasoning_tokens=sum(event.reasoning_tokens for event in events),
                category=self._classifier.category,
            )
        ]


def _has_text(events: list[Event]) -> bool:
    """Return True if there is text to judge; answers that failed or were cancelled are not shown."""
    return events[-1].finish_reason in ("stop", "length") and any(
        event.text or event.reasoning for event in events
    )
