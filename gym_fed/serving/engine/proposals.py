"""Propose an answer's next tokens, which one step then verifies together (speculative decoding).

A proposed token counts only if the answer's own sampler chooses it, so answers do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.serving.forward.kv_cache import KVCache, KVPool

_LONGEST = 4
_SHORTEST = 2


class Proposer:
    """Proposes tokens for one answer; the base class of both methods.

    Args:
        ids: Prompt and answer; the sequence's own list, which grows.
        most: Maximum number of tokens of a proposal.
    """

    def __init__(self, ids: list[int], most: int) -> None:
        self.ids, self._most = ids, most
        self.width = most
        """Number of tokens of the next proposal."""

    def propose(self, most: int) -> list[int]:
        """Return the likely next tokens, at most ``most``; empty if nothing is likely."""
        raise NotImplementedError

    def observe(self, proposed: int, accepted: int) -> None:
        """Adapt the length of the next proposals: longer if all tokens were accepted, and shorter otherwise."""
        self.width = min(self._most, 2 * self.width) if accepted == proposed else max(1, accepted)


class NgramProposer(Proposer):
    """Looks up the last n-gram in prompt and answer (prompt lookup decoding)."""

    def __init__(self, ids: list[int], most: int) -> None:
        super().__init__(ids, most)
        self._after: dict[tuple[int, ...], int] = {}
        """The position after the last occurrence of each n-gram."""
        self._indexed = 0

    def propose(self, most: int) -> list[int]:
        ids, after = self.ids, self._after
        for end in range(max(_SHORTEST, self._indexed), len(ids)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                after[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)
        count = min(most, self.width)
        if count <= 0:
            return []
        for size in range(min(_LONGEST, len(ids)), _SHORTEST - 1, -1):
            place = after.get(tuple(ids[-size:]))
            if place is not None:
                period = len(ids) - place  # assume that the text repeats itself
                return [ids[place + number % period] for number in range(count)]
        return []


class DraftProposer(Proposer):
    """Proposes what ``DraftModel.prepare`` has computed for this answer."""

    def __init__(self, ids: list[int], most: int) -> None:
        super().__init__(ids, most)
        self.ready: list[int] = []
        """The next proposal."""
        self._cache: KVCache | None = None
        self._cached: list[int] = []
        """The tokens in the draft's KV cache."""
        self._checked = 0
        """Number of cached tokens that were compared with the answer."""

    def propose(self, most: int) -> list[int]:
        return self.ready[: max(0, most)]

    def missing(self, cache: KVCache) -> list[int]:
        """Drop rejected tokens from the KV cache, and return the tokens that it lacks, at least one."""
        last = min(len(self._cached), len(self.ids) - 1)
        place = min(self._checked, last)
        while place < last and self._cached[place] == self.ids[place]:
            place += 1
        del self._cached[place:]
        cache.truncate(place)
        self._checked = place
        return self.ids[place:]

    def cache(self, pool: KVPool) -> KVCache:
        """Return the draft's KV cache of this answer."""
        if self._cache is None:
            self._cache = pool.new_cache()
        return self._cache

    def add(self, tokens: Sequence[int]) -> None:
        """Record tokens that a step has added to the KV cache."""
        self._cached += tokens

    def release(self) -> None:
        """Release the KV cache. May be called repeatedly."""
        if self._cache is not None:
            self._cache.release()
        self._cache, self._cached, self._checked, self.ready = None, [], 0, []
