"""How many prompt tokens a step may prefill beside running answers, learned from how long steps take. No torch.

Answers that run must not stall while a long prompt is prefilled. So a step with prefill may take a few times as long
as the same step without it: how long that one is, and what a prompt token adds, is measured all the time. Where several
prompts wait, steps will soon take longer by their answers, and so may a step with prefill.
"""

from __future__ import annotations

_SMOOTHING = 0.3
"""Weight of the newest measurement."""
_OUTLIER = 2.0
"""A measurement counts as no more than so many times the average, and no less than its inverse."""
_LEAST = 5
"""Prompt tokens of every step with prefill, so that a prompt is always read."""
_FIRST = 16
"""Of the first one, when nothing is known."""
_GROWTH = 2.0
"""A step has at most so many times the prompt tokens of the one before."""
_STALE = 16
"""After so many steps with prefill one without is measured again."""


class StepCost:
    """Measures steps.

    Args:
        stretch: How many times as long as without prefill a step with it may take; None: any time.
    """

    def __init__(self, stretch: float | None) -> None:
        self._stretch = stretch
        self._decode: dict[int, float] = {}
        """Seconds of a step that only decodes, by its tokens."""
        self._per_token = 0.0
        """Seconds that a prompt token adds to such a step."""
        self._last = 0
        self._since = 0

    def prefill_tokens(self, decode_tokens: int, most: int, joining: int = 1) -> int:
        """Prompt tokens of a step that decodes so many tokens, at most ``most``; 0 where it is measured without.

        Args:
            decode_tokens: Of the answers that run.
            most: Whatever the time.
            joining: Answers that begin when their prompts are read; all but one count as if they ran.
        """
        if self._stretch is None or not decode_tokens:
            return most
        if not self._decode or self._since >= _STALE:
            return 0
        if not self._last:
            return min(most, _FIRST)
        fitting = _GROWTH * self._last
        if self._per_token > 0:
            alone = self._alone(decode_tokens)
            allowed = self._stretch * max(alone, self._alone(decode_tokens + joining - 1))
            fitting = min(fitting, (allowed - alone) / self._per_token)
        return min(most, max(_LEAST, int(fitting)))

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a step that succeeded."""
        if self._stretch is None or not decode_tokens:
            return
        if not prefill_tokens:
            self._decode[decode_tokens] = _smoothed(self._decode.get(decode_tokens), seconds)
            self._since = 0
            return
        self._since += 1
        self._last = prefill_tokens
        if self._decode:
            added = max(0.0, seconds - self._alone(decode_tokens)) / prefill_tokens
            self._per_token = _smoothed(self._per_token or None, added)

    def _alone(self, decode_tokens: int) -> float:
        nearest = min(self._decode, key=lambda known: abs(known - decode_tokens))
        return self._decode[nearest]


def _smoothed(average: float | None, found: float) -> float:
    if average is None:
        return found
    found = min(_OUTLIER * average, max(average / _OUTLIER, found))
    return average + _SMOOTHING * (found - average)
