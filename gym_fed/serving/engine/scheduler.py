"""What runs in a step: every request in decode, and as much prefill as the step's tokens and time allow.

Where a request in decode needs a KV block and none is left, another one is preempted: it gives its blocks back, waits
at the front of its user's queue, and its tokens so far are computed again later. So its answer goes on as if nothing
had happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gym_fed.serving.engine.sequence import GenerationSequence, ScheduledRequest
from gym_fed.serving.engine.step_cost import StepCost
from gym_fed.serving.forward.chunk import Chunk
from gym_fed.serving.forward.picture_rows import rows_between

if TYPE_CHECKING:
    from gym_fed.config.serving import EngineConfig
    from gym_fed.serving.engine.fair_queue import TokenCounters


@dataclass
class ScheduledStep:
    """The chunks of a step and their requests; those in decode come first.

    Attributes:
        rows: Requests.
        chunks: Of each.
        decode_rows: Requests in decode.
        decode_tokens: Newest tokens of requests in decode, and proposed ones.
        prefill_tokens: Of prompts, and of preempted requests.
    """

    rows: list[ScheduledRequest] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode_rows: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0


class Scheduler:
    """The running requests.

    Args:
        config: Limits of a step.
        tokens: Of all users: prefill is for the least served ones first.
        preempt: Takes a request out of ``running`` and its cache from it.
    """

    def __init__(
        self, config: EngineConfig, tokens: TokenCounters, preempt: Callable[[ScheduledRequest], None]
    ) -> None:
        self.running: list[ScheduledRequest] = []
        self.cost = StepCost(config.step_stretch)
        self._config = config
        self._tokens = tokens
        self._preempt = preempt

    def schedule(self) -> ScheduledStep:
        """The next step; at least one chunk, where any request runs."""
        for row in list(self.running):
            if row.cache is not None and _decodes(row):
                self._make_room(row)
        decode = [row for row in self.running if _decodes(row)]
        prefill = [row for row in self.running if not _decodes(row)]
        left = self._config.max_batch_tokens - bool(prefill)  # one token is always left for prefill
        if len(decode) > left:  # more than a step takes: round robin
            decode, late = decode[:left], decode[left:]
            self.running = [*late, *prefill, *decode]
        left -= len(decode)
        step = ScheduledStep()
        for row in decode:
            assert isinstance(row, GenerationSequence)
            left -= self._decode(step, row, left)
        if prefill:
            prefill.sort(key=lambda row: self._tokens.served(row.user))  # stable: a user's oldest first
            joining = sum(isinstance(row, GenerationSequence) for row in prefill)
            self._prefill(step, prefill, self.cost.prefill_tokens(step.decode_tokens, left + 1, joining))
        return step

    def _decode(self, step: ScheduledStep, row: GenerationSequence, left: int) -> int:
        """Add its newest token and proposed ones; returns how many these are."""
        assert row.cache is not None
        proposal = row.propose(left)
        if proposal and not row.cache.reserve(1 + len(proposal)):
            proposal = []  # not worth a preemption
        count = 1 + len(proposal)
        step.rows.append(row)
        step.chunks.append(
            Chunk([row.ids[-1], *proposal], row.cache, row.variant, wants_logits=True, num_logits=count)
        )
        step.decode_rows += 1
        step.decode_tokens += count
        return len(proposal)

    def _prefill(self, step: ScheduledStep, rows: list[ScheduledRequest], left: int) -> None:
        for row in rows:
            if left <= 0:
                return
            assert row.cache is not None
            start = row.cache.length
            ids = row.ids[start : start + left]
            left -= len(ids)
            last = row.hidden is None and start + len(ids) == len(row.ids)
            step.rows.append(row)
            seen = rows_between(row.pictures, start, start + len(ids))
            step.chunks.append(Chunk(ids, row.cache, row.variant, last, row.hidden, pictures=seen))
            step.prefill_tokens += len(ids)

    def _make_room(self, row: ScheduledRequest) -> None:
        """Reserve a block for its next token, if it needs one, at the cost of others or of itself."""
        while row.cache is not None and not row.cache.reserve(1):
            victim = self._victim()
            if victim is None:
                return  # the step refuses it
            self._preempt(victim)

    def _victim(self) -> ScheduledRequest | None:
        """The newest request of the user whose requests hold most blocks; never the oldest of all, so that one ends."""
        held: Counter[str] = Counter()
        for row in self.running:
            assert row.cache is not None
            held[row.user] += len(row.cache.blocks)
        others = sorted(self.running, key=lambda row: row.arrival)[1:]
        return max(others, key=lambda row: (held[row.user], row.arrival), default=None)


def _decodes(row: ScheduledRequest) -> bool:
    return isinstance(row, GenerationSequence) and row.decoding
