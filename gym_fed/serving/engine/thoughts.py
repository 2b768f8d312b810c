"""Track the thought of an answer, the grammar that follows it, and the log-probabilities of the answer."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gym_fed.serving.reasoning.base import AnswerSplit, Splitter

if TYPE_CHECKING:
    from gym_fed.serving.engine.detokenizing import StopTexts, TextStream
    from gym_fed.serving.engine.guided import Guide
    from gym_fed.serving.engine.request import TokenLogprob
    from gym_fed.serving.reasoning.base import ReasoningParser


class Thought:
    """Tracks the thought of one answer. Acts as a ``TokenMask`` while ``masks`` is True.

    A grammar applies to the answer after the thought. Until then, end tokens are banned. If the
    thought is optional, the first token may begin either a thought or the grammar's value.

    Args:
        parser: The model's parser.
        splitter: The splitter of this answer.
        budget: Maximum number of tokens of the thought; None: no limit.
        guide: The guide of the answer's grammar, if it has one.
        end_ids: Tokens that end the answer.
        stop_ids: The end tokens that the caller chose, which do not end the thought.
        vocab_size: Width of the logits.
    """

    def __init__(
        self,
        parser: ReasoningParser,
        splitter: Splitter,
        *,
        budget: int | None,
        guide: Guide | None,
        end_ids: frozenset[int],
        stop_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._parser, self._splitter, self._budget = parser, splitter, budget
        self._guide, self._end_ids, self._vocab_size = guide, sorted(end_ids), vocab_size
        self._stop_ids = stop_ids
        self._forced: deque[int] = deque()
        self._opening_token: int | None = None  # opens a thought although the grammar bans it
        self._guided: list[int] = []  # tokens accepted by the guide that may turn out to begin a thought
        self.num_tokens = 0
        """The number of tokens of the thought so far, including its marks."""
        self._pushed = 0
        self._in_answer: list[bool] = []
        """For each token, True if it belongs to the answer, as far as this is known."""
        self._close_if_over()

    @property
    def masks(self) -> bool:
        """True if the next token is constrained."""
        return bool(self._forced) or self._guide is not None

    @property
    def is_unfinished(self) -> bool:
        """True inside a thought, until the answer after it begins."""
        return self._splitter.unfinished

    def in_answer(self, index: int) -> bool:
        """Return True if a token belongs to the answer; marks and line breaks next to a thought do not."""
        if index < len(self._in_answer):
            return self._in_answer[index]
        return self._splitter.answering or self._splitter.waiting  # only white space so far, or the end token

    def may_end_at(self, token_id: int) -> bool:
        """Return True if an end token ends the answer at this point."""
        return not self._splitter.thinking or token_id not in self._stop_ids

    @property
    def complete(self) -> bool:
        """True if the grammar's value is complete."""
        return self._guide is not None and not self._splitter.thinking and self._guide.complete

    def banned(self) -> Any:
        """Return a mask of the tokens that may not come next. Raises the errors of ``Guide.banned``."""
        import numpy as np

        if self._forced:
            mask = np.ones(self._vocab_size, dtype=bool)
            mask[self._forced[0]] = False
            return mask
        assert self._guide is not None
        if self._splitter.answering:
            return self._guide.banned()
        if self._splitter.waiting:
            mask = self._guide.banned()
            opening, begun = self._parser.opening, len(self._guided)
            self._opening_token = None
            if begun < len(opening) and list(opening[:begun]) == self._guided and mask[opening[begun]]:
                self._opening_token = opening[begun]
                mask[opening[begun]] = False
            return mask
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[[end for end in self._end_ids if self.may_end_at(end)]] = True
        return mask

    def push(self, token_id: int, stream: TextStream) -> AnswerSplit:
        """Add the sampled token. Raises the errors of ``Guide.push``."""
        splitter = self._splitter
        if self._forced:
            self._forced.popleft()
        elif self._guide is not None and splitter.answering:
            self._guide.push(token_id)
        elif self._guide is not None and splitter.waiting:
            begun = len(self._guided)
            if token_id == self._opening_token:
                self._forced.extend(self._parser.opening[begun + 1 :])
            else:
                self._guide.push(token_id)
                self._guided.append(token_id)
        was_thinking, may_answer = splitter.thinking, splitter.answering or splitter.waiting
        split = splitter.push(token_id, stream)
        if self._guide is not None and self._guided and splitter.thinking:
            # These tokens, which the grammar also allowed, were the beginning of a thought
            self._guide.rollback(len(self._guided))
            self._guided.clear()
        self.num_tokens += was_thinking or splitter.thinking
        self._pushed += 1
        if not splitter.waiting:
            belongs = splitter.answering and may_answer and not splitter.dropped
            self._in_answer += [belongs] * (self._pushed - len(self._in_answer))
        self._close_if_over()
        return split

    def end(self) -> AnswerSplit:
        """End the answer, and return the held-back text."""
        return self._splitter.end()

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return self._splitter.held

    def _close_if_over(self) -> None:
        over = self._budget is not None and self.num_tokens >= self._budget
        if over and self._splitter.thinking and not self._forced:
            self._forced.extend(self._parser.closing)


class PendingLogprobs:
    """The log-probabilities of an answer's tokens whose text is not shown yet, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob, int, int]] = deque()

    def put(self, index: int, logprob: TokenLogprob, span: tuple[int, int]) -> None:
        """Add the log-probability of a token.

        Args:
            index: The token's index in the answer.
            logprob: Its log-probability.
            span: Its characters in the decoded text (``TextStream.span``).
        """
        self._waiting.append((index, logprob, *span))

    def take(self, decoded: int, stops: StopTexts, *, last: bool) -> list[tuple[int, TokenLogprob]]:
        """Return the log-probabilities of tokens whose text is shown, with their indices and places in the answer.

        Args:
            decoded: The number of decoded characters that were split into thought and answer.
            stops: The answer's stop texts.
            last: True at the end of the answer, where a partly shown token counts as shown.
        """
        before = decoded - stops.taken  # characters of the thought
        shown = before + stops.shown
        taken = []
        while self._waiting:
            index, logprob, start, end = self._waiting[0]
            if end > shown and not (last and start < shown):
                break
            self._waiting.popleft()
            taken.append((index, replace(logprob, start=start - before, end=min(end, shown) - before)))
        return taken
