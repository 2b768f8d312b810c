"""Log-probabilities that wait until the text of their tokens is shown."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.serving.engine.detokenizing import StopTexts
    from gym_fed.serving.engine.request import TokenLogprob


class PendingLogprobs:
    """The log-probabilities of one answer whose tokens are not shown yet, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob, int, int]] = deque()

    def put(self, index: int, logprob: TokenLogprob, span: tuple[int, int]) -> None:
        """Add that of a token.

        Args:
            index: The token's index in the answer.
            logprob: Its log-probability.
            span: Its characters in the decoded text (``TextStream.span``).
        """
        self._waiting.append((index, logprob, *span))

    def take(self, decoded: int, stops: StopTexts, *, last: bool) -> list[tuple[int, TokenLogprob]]:
        """Return those of the tokens whose text is shown, with their indices and their places in the answer.

        Args:
            decoded: The number of decoded characters that were divided into thought and answer.
            stops: The stop texts that the answer went through.
            last: Whether nothing follows. A token that is shown in part then counts as shown.
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
