"""Speculative decoding by prompt look-up: what followed the last tokens before is proposed as the next. No torch.

Saxena 2023, "Prompt Lookup Decoding"; vLLM's n-gram proposer. A step computes the logits after every proposed token.
Tokens are then sampled one by one, as without proposals, for as long as they are the proposed ones. So the answer is
the same, and only the number of steps changes.
"""

from __future__ import annotations

_LONGEST = 4
_SHORTEST = 2


class NgramProposer:
    """Proposes tokens of one answer.

    Args:
        ids: Prompt and answer; the sequence's own list, which grows.
        most: Tokens of a proposal.
    """

    def __init__(self, ids: list[int], most: int) -> None:
        self._ids = ids
        self._most = most
        self._width = most
        self._after: dict[tuple[int, ...], int] = {}
        """By n-gram: the place after its last occurrence."""
        self._indexed = 0

    def propose(self, most: int) -> list[int]:
        """The likely next tokens, at most ``most``; empty where the last ones are new."""
        ids, after = self._ids, self._after
        for end in range(max(_SHORTEST, self._indexed), len(ids)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                after[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)
        count = min(most, self._width)
        if count <= 0:
            return []
        for size in range(min(_LONGEST, len(ids)), _SHORTEST - 1, -1):
            place = after.get(tuple(ids[-size:]))
            if place is not None:
                period = len(ids) - place  # beyond the end it is expected to repeat
                return [ids[place + number % period] for number in range(count)]
        return []

    def observe(self, proposed: int, accepted: int) -> None:
        """Propose more where all was right, and fewer where it was not."""
        self._width = min(self._most, 2 * self._width) if accepted == proposed else max(1, accepted)
