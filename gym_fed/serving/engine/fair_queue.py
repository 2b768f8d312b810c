"""One queue of requests per user, served so that every user gets the same share of tokens. No torch.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, algorithm 2). Each
user has a counter of the tokens computed for them; an answer's token counts as two of a prompt. The waiting user with
the smallest counter is next. A user who returns after a pause starts at the smallest counter of the present users, so
that absence earns no credit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.serving.engine.sequence import ScheduledRequest

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
_REMEMBERED_USERS = 4096


class TokenCounters:
    """The virtual token counter of every user, in weighted tokens."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()
        self._present: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    def arrive(self, user: str) -> None:
        """Count one more present request of ``user``."""
        if not self._present[user]:
            floor = min((self._served[other] for other in +self._present), default=0)
            self._served[user] = max(self._served.get(user, 0), floor)
            self._served.move_to_end(user)
        self._present[user] += 1

    def leave(self, user: str) -> None:
        """Count the end of one of their requests."""
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
        """Weighted tokens; comparable between present users."""
        return self._served.get(user, 0)


class FairQueue:
    """Waiting requests, in each user's own order."""

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
        """Waiting requests of one user."""
        return len(self._queues.get(user, ()))

    def put(self, request: ScheduledRequest, *, front: bool = False) -> None:
        """Append to its user's queue, or put it at its front."""
        queue = self._queues.setdefault(request.user, deque())
        if front:
            queue.appendleft(request)
        else:
            queue.append(request)
        self._length += 1

    def remove(self, request: ScheduledRequest) -> bool:
        """Remove it; returns whether it was waiting."""
        queue = self._queues.get(request.user)
        if queue is None or request not in queue:
            return False
        queue.remove(request)
        self._length -= 1
        if not queue:
            del self._queues[request.user]
        return True

    def by_priority(self) -> Iterator[ScheduledRequest]:
        """All waiting requests, the least served user's first; among equals, of the user with fewest running."""
        users = list(self._queues)  # by arrival: the sort is stable
        users.sort(key=lambda user: (self._tokens.served(user), self._tokens.running[user]))
        for user in users:
            yield from list(self._queues.get(user, ()))
