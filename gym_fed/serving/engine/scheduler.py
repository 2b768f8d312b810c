"""Schedule each step: all requests in decode, and as much prefill as the step's token budget and time allow.

If a request in decode needs a KV block and none is left, another request is preempted: it returns its blocks, waits at
the front of its user's queue, and its tokens so far are computed again later. The answer does not change.

Users are served fairly by the virtual token counters of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024, algorithm 2). Each user has a counter of the tokens computed for them; an answer's token counts as much as two of
a prompt. The waiting user with the smallest counter is next. A user who returns after a pause starts at the smallest
counter of the present users, so that absence earns no credit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gym_fed.serving.engine.sequence import GenerationSequence, ScheduledRequest
from gym_fed.serving.forward.chunk import Chunk, positions_between, rows_between

if TYPE_CHECKING:
    from gym_fed.config.serving import EngineConfig
    from gym_fed.serving.engine.draft_model import DraftModel


PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
_REMEMBERED_USERS = 4096


class TokenCounters:
    """The virtual token counters of all users, in weighted tokens."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()
        self._present: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    def arrive(self, user: str) -> None:
        """Count one more request of ``user``."""
        if not self._present[user]:
            floor = min((self._served[other] for other in +self._present), default=0)
            self._served[user] = max(self._served.get(user, 0), floor)
            self._served.move_to_end(user)
        self._present[user] += 1

    def leave(self, user: str) -> None:
        """Count the end of a request of ``user``."""
        self._present[user] -= 1
        if self._present[user] <= 0:
            del self._present[user]
            self.running.pop(user, None)
            if len(self._served) > _REMEMBERED_USERS:
                del self._served[next(name for name in self._served if not self._present[name])]

    def charge(self, user: str, tokens: int) -> None:
        """Add ``tokens`` (weighted) to the counter of ``user``."""
        self._served[user] = self._served.get(user, 0) + tokens

    def served(self, user: str) -> int:
        """Return the weighted tokens of ``user``; comparable between present users."""
        return self._served.get(user, 0)


class FairQueue:
    """The waiting requests, in one queue per user."""

    def __init__(self, tokens: TokenCounters) -> None:
        self._tokens = tokens
        self._queues: dict[str, deque[ScheduledRequest]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ScheduledRequest]:
        for queue in list(self._queues.values()):
            yield from list(queue)

    def count(self, user: str) -> int:
        """Count the waiting requests of one user."""
        return len(self._queues.get(user, ()))

    def put(self, request: ScheduledRequest, *, front: bool = False) -> None:
        """Add a request to its user's queue, at the end or at the front."""
        queue = self._queues.setdefault(request.user, deque())
        if front:
            queue.appendleft(request)
        else:
            queue.append(request)
        self._length += 1

    def remove(self, request: ScheduledRequest) -> bool:
        """Remove a request, and return True if it was waiting."""
        queue = self._queues.get(request.user)
        if queue is None or request not in queue:
            return False
        queue.remove(request)
        self._length -= 1
        if not queue:
            del self._queues[request.user]
        return True

    def by_priority(self) -> Iterator[ScheduledRequest]:
        """Iterate over waiting requests, the least served user's first; on a tie, the user with the fewest running."""
        users = list(self._queues)  # in order of arrival, which the stable sort keeps
        users.sort(key=lambda user: (self._tokens.served(user), self._tokens.running[user]))
        for user in users:
            yield from list(self._queues.get(user, ()))


@dataclass
class ScheduledStep:
    """The chunks of one step and their requests; those in decode come first.

    Attributes:
        rows: The requests.
        chunks: One chunk for each request.
        decode_rows: The number of requests in decode.
        decode_tokens: The number of newest and proposed tokens of requests in decode.
        prefill_tokens: The number of prefilled tokens of prompts and of preempted requests.
    """

    rows: list[ScheduledRequest] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode_rows: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0


class Scheduler:
    """Chooses the tokens that running requests compute in each step.

    Args:
        config: Limits of a step.
        tokens: The token counters of all users; the least served user's prompt is prefilled first.
        preempt: Function that removes a request from ``running`` and frees its cache.
        whole_prompts: True if prompts are prefilled in one step, regardless of their length.
        draft: The model that proposes tokens; None: without one.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokens: TokenCounters,
        preempt: Callable[[ScheduledRequest], None],
        *,
        whole_prompts: bool = False,
        draft: DraftModel | None = None,
    ) -> None:
        self.running: list[ScheduledRequest] = []
        self.cost = StepCost(config.step_stretch)
        self._config = config
        self._tokens = tokens
        self._preempt = preempt
        self._whole_prompts = whole_prompts
        self._draft = draft

    def schedule(self) -> ScheduledStep:
        """Return the next step; it has at least one chunk if any request runs."""
        for row in list(self.running):
            if row.cache is not None and _decodes(row):
                self._make_room(row)
        decode = [row for row in self.running if _decodes(row)]
        prefill = [row for row in self.running if not _decodes(row)]
        budget = self._config.max_batch_tokens - bool(prefill)  # always leave one token for prefill
        if len(decode) > budget:  # too many for one step, so take turns
            decode, late = decode[:budget], decode[budget:]
            self.running = [*late, *prefill, *decode]
        budget -= len(decode)
        if self._draft is not None:
            self._draft.prepare([row for row in decode if isinstance(row, GenerationSequence)])
        step = ScheduledStep()
        for row in decode:
            assert isinstance(row, GenerationSequence)
            budget -= self._decode(step, row, budget)
        if prefill:
            prefill.sort(key=lambda row: self._tokens.served(row.user))  # stable: a user's oldest first
            joining = sum(isinstance(row, GenerationSequence) for row in prefill)
            self._prefill(step, prefill, self.cost.prefill_tokens(step.decode_tokens, budget + 1, joining))
        return step

    def _decode(self, step: ScheduledStep, row: GenerationSequence, left: int) -> int:
        """Add a request's newest and proposed tokens; return the number of proposed ones."""
        assert row.cache is not None
        proposal = row.propose(left)
        if proposal and not row.cache.reserve(1 + len(proposal)):
            proposal = []  # a proposal is not worth a preemption
        count = 1 + len(proposal)
        step.rows.append(row)
        ids, at = [row.ids[-1], *proposal], row.cache.length
        places = positions_between(row.pictures, at, at + count)
        step.chunks.append(Chunk(ids, row.cache, row.variant, num_logits=count, positions=places))
        step.decode_rows += 1
        step.decode_tokens += count
        return len(proposal)

    def _prefill(self, step: ScheduledStep, rows: list[ScheduledRequest], left: int) -> None:
        for row in rows:
            if left <= 0:
                return
            assert row.cache is not None
            start = row.cache.length
            ids = row.ids[start:] if self._whole_prompts else row.ids[start : start + left]
            left -= len(ids)
            last = row.hidden is None and start + len(ids) == len(row.ids)
            step.rows.append(row)
            seen = rows_between(row.pictures, start, start + len(ids))
            places = positions_between(row.pictures, start, start + len(ids))
            step.chunks.append(
                Chunk(ids, row.cache, row.variant, last, row.hidden, pictures=seen, positions=places)
            )
            step.prefill_tokens += len(ids)

    def _make_room(self, row: ScheduledRequest) -> None:
        """Reserve a block for a request's next token, if it needs one, by preempting others or itself."""
        while row.cache is not None and not row.cache.reserve(1):
            victim = self._victim()
            if victim is None:
                return  # the step will report the error
            self._preempt(victim)

    def _victim(self) -> ScheduledRequest | None:
        """Choose the request to preempt: the newest of the user with the most blocks, but never the oldest of all."""
        held: Counter[str] = Counter()
        for row in self.running:
            assert row.cache is not None
            held[row.user] += len(row.cache.blocks)
        others = sorted(self.running, key=lambda row: row.arrival)[1:]
        return max(others, key=lambda row: (held[row.user], row.arrival), default=None)


def _decodes(row: ScheduledRequest) -> bool:
    return isinstance(row, GenerationSequence) and row.decoding


_SMOOTHING = 0.3
"""Weight of the newest measurement in the moving average."""
_OUTLIER = 2.0
"""A measurement is clipped to this many times the average, and to its inverse."""
_MIN_PREFILL = 5
"""Minimum prompt tokens of a step with prefill, so that prompts always progress."""
_FIRST = 16
"""Prompt tokens of the first step with prefill, before any measurement."""
_GROWTH = 2.0
"""Maximum ratio of a step's prompt tokens to those of the previous step with prefill."""
_STALE = 16
"""Remeasure a decode-only step every N steps with prefill."""


class StepCost:
    """Estimates the duration of steps, to limit the delay of running answers by prefill.

    A step with prefill may take ``stretch`` times as long as the same step without it. The decode-only time and the
    cost of a prompt token are measured continuously. If several prompts wait, their answers will soon make steps longer
    anyway, so a step with prefill may also take that long.

    Args:
        stretch: Maximum ratio of a step's time with prefill to its time without; None: no limit.
    """

    def __init__(self, stretch: float | None) -> None:
        self._stretch = stretch
        self._decode: dict[int, float] = {}
        """Seconds of a decode-only step, by its number of tokens."""
        self._per_token = 0.0
        """Seconds that a prompt token adds to such a step."""
        self._last = 0
        self._since = 0

    def prefill_tokens(self, decode_tokens: int, most: int, joining: int = 1) -> int:
        """Return the maximum number of prompt tokens to prefill in a step; 0 to measure a step without prefill.

        Args:
            decode_tokens: Tokens that the running answers decode in the step.
            most: The budget of the step.
            joining: Answers that begin after their prompts are prefilled; all but one count as running.
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
        return min(most, max(_MIN_PREFILL, int(fitting)))

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Update the estimates from a step that succeeded."""
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


def _smoothed(average: float | None, measured: float) -> float:
    if average is None:
        return measured
    measured = min(_OUTLIER * average, max(average / _OUTLIER, measured))
    return average + _SMOOTHING * (measured - average)
