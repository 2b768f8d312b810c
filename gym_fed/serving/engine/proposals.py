"""Propose an answer's next tokens, which one step then verifies together (speculative decoding).

A proposed token counts only if the answer's own sampler chooses it, so answers do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from gym_fed.serving.forward.chunk import Chunk

if TYPE_CHECKING:
    from gym_fed.serving.engine.sequence import GenerationSequence
    from gym_fed.serving.forward.kv_cache import KVCache
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

_log = logging.getLogger("gym_fed")

_LONGEST = 4
_SHORTEST = 2
_FREE_ROWS = {"cpu": 8}
"""Rows of a step that take about as long as one, since all weights are read anyway; measured with bfloat16 weights."""
_FREE_ROWS_ELSEWHERE = 64
_MIN_TOKENS = 2
"""Shorter drafts cost more than they save: with four answers, one token each lowers the rate by 6%."""
_MAX_FAILURES = 3


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

    def cache(self, draft: DraftCaches) -> KVCache:
        """Return the draft's KV cache of this answer."""
        if self._cache is None:
            self._cache = draft.new_cache()
        return self._cache

    def add(self, tokens: Sequence[int]) -> None:
        """Record tokens that a step has added to the KV cache."""
        self._cached += tokens

    def release(self) -> None:
        """Release the KV cache. May be called repeatedly."""
        if self._cache is not None:
            self._cache.release()
        self._cache, self._cached, self._checked, self.ready = None, [], 0, []


class DraftCaches(Protocol):
    """The source of a draft's KV caches."""

    def new_cache(self) -> KVCache: ...


class DraftModel:
    """A smaller model, whose most likely tokens are proposed (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        served: The draft, used by the engine's thread only.
        kv_bytes: Maximum size of its KV caches.
        vocabulary: Number of token ids of the base.
        max_tokens: Maximum number of tokens of prompts and answers that the draft reads before a step.
    """

    def __init__(self, served: MultiVariantModel, kv_bytes: int, vocabulary: int, max_tokens: int) -> None:
        self._served = served
        self._pool = served.new_pool(max(kv_bytes, served.pool.block_bytes))
        self._vocabulary, self._max_tokens = min(vocabulary, served.vocabulary), max_tokens
        self._rows = _FREE_ROWS.get(str(served.layout.device), _FREE_ROWS_ELSEWHERE)
        self._active: set[DraftProposer] = set()
        self._failures = 0  # in a row

    def prepare(self, rows: Sequence[GenerationSequence]) -> None:
        """Compute the proposals of all answers in decode: fewer tokens for more answers, and none with images."""
        proposers: dict[DraftProposer, int] = {}
        most = self._rows // max(1, len(rows)) - 1
        if most < _MIN_TOKENS:
            most = 0
        for row in rows:
            if isinstance(row.proposer, DraftProposer) and not row.pictures:
                row.proposer.ready = []
                proposers[row.proposer] = min(row.proposer.width, row.most_proposed, most)
        self.release(keep=set(proposers))
        self._active = set(proposers)
        if self._failures >= _MAX_FAILURES:
            return
        try:
            self._compute({proposer: count for proposer, count in proposers.items() if count > 0})
            self._failures = 0
        except Exception:  # noqa: BLE001 - logged; the answers need no proposals
            self._failures += 1
            off = "; it is off until the next start" if self._failures >= _MAX_FAILURES else ""
            _log.exception("the draft model failed, and this step has no proposals%s", off)
            self.release()

    def release(self, keep: frozenset[DraftProposer] | set[DraftProposer] = frozenset()) -> None:
        """Release the KV caches of the answers that are not in ``keep``."""
        for proposer in self._active - keep:
            proposer.release()
        self._active &= keep

    def _compute(self, counts: dict[DraftProposer, int]) -> None:
        left = self._max_tokens
        reading: list[tuple[DraftProposer, KVCache, list[int]]] = []
        for proposer, count in counts.items():
            cache = proposer.cache(self._pool)
            missing = proposer.missing(cache)
            part = missing[:left]
            if part and cache.reserve(len(missing) + count - 1):
                left -= len(part)
                reading.append((proposer, cache, part))
        while reading:
            logits = self._served.step([Chunk(part, cache) for _, cache, part in reading])
            likely = logits[:, : self._vocabulary].argmax(-1).tolist()
            following = []
            for (proposer, cache, part), token in zip(reading, likely, strict=True):
                proposer.add(part)
                if cache.length < len(
                    proposer.ids
                ):  # the rest of a long prompt is read before the next steps
                    continue
                proposer.ready.append(token)
                if len(proposer.ready) < counts[proposer]:
                    following.append((proposer, cache, [token]))
            reading = following
