"""A draft model, which proposes the next tokens of all answers in decode at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gym_fed.serving.engine.proposals import DraftProposer
from gym_fed.serving.forward.chunk import Chunk

if TYPE_CHECKING:
    from gym_fed.serving.engine.sequence import GenerationSequence
    from gym_fed.serving.forward.kv_cache import KVCache
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

_log = logging.getLogger("gym_fed")

_FREE_ROWS = {"cpu": 5}
"""Rows of a step that take about as long as one, since all weights are read anyway. A CPU has room for one answer's
proposals: with two answers, SmolLM2 was 9% slower."""
_FREE_ROWS_ELSEWHERE = 64
_MIN_TOKENS = 2
"""Shorter drafts cost more than they save."""
_MAX_FAILURES = 3


class DraftModel:
    """A smaller model, whose most likely tokens are proposed (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        served: The draft, used by the engine's thread only.
        kv_bytes: Maximum size of its KV caches.
        vocabulary: Number of token ids of the base.
        max_tokens: Maximum number of tokens of prompts and answers that the draft reads before a step.
        context: Maximum number of tokens of a text that the draft reads.
    """

    def __init__(
        self, served: MultiVariantModel, kv_bytes: int, vocabulary: int, max_tokens: int, context: int
    ) -> None:
        self._served, self._context = served, context
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
            if not part or max(part) >= self._vocabulary or len(proposer.ids) + count > self._context:
                continue  # a variant's added token, or a text that is too long for the draft
            if cache.reserve(len(missing) + count - 1):
                left -= len(part)
                reading.append((proposer, cache, part))
        while reading:
            logits = self._served.step([Chunk(part, cache) for _, cache, part in reading])
            likely = logits[:, : self._vocabulary].argmax(-1).tolist()
            following = []
            for (proposer, cache, part), token in zip(reading, likely, strict=True):
                proposer.add(part)
                if cache.length < len(proposer.ids):
                    continue  # the rest of a long prompt is read before the next steps
                proposer.ready.append(token)
                if len(proposer.ready) < counts[proposer]:
                    following.append((proposer, cache, [token]))
            reading = following
