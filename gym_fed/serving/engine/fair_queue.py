"""Queues of work, one a user, served so that everyone gets the same share of tokens. No torch.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, algorithm 2): each
user has a counter of the tokens that were worked for them (an answer's token counts as two of a prompt), and whoever
waits with the smallest counter is next. Who comes back after a pause starts at the smallest counter of those who are
here, so that absence earns no credit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_fed.serving.engine.sequence import Work

PROMPT_WEIGHT = 1
ANSWER_WEIGHT = 2
_REMEMBERED_USERS = 4096


class Shares:
    """What every user has had, in weighted tokens."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()
        self._present: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    def arrive(self, user: str) -> None:
        """One more request of ``user`` is here."""
        if not self._present[user]:
            floor = min((self._served[other] for other in +self._present), default=0)
            self._served[user] = max(self._served.get(user, 0), floor)
            self._served.move_to_end(user)
        self._present[user] += 1

    def leave(self, user: str) -> None:
        """One of their requests has ended."""
        self._present[user] -= 1
        if self._present[user] <= 0:
            del self._present[user]
            self.running.pop(user, None)
            if len(self._served) > _REMEMBERED_USERS:
                del self._served[next(name for name in self._served if not self._present[name])]

    def charge(self, user: str, tokens: int) -> None:
        """``tokens`` (weighted) were worked for ``user``."""
        self._served[user] = self._served.get(user, 0) + tokens

    def served(self, user: str) -> int:
        """Weighted tokens; comparable between those who are here."""
        return self._served.get(user, 0)


class FairQueue:
    """Work that waits, in each user's own order."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._queues: dict[str, deque[Work]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Work]:
        for queue in list(self._queues.values()):
            yield from list(queue)

    def count(self, user: str) -> int:
        """Of one user."""
        return len(self._queues.get(user, ()))

    def put(self, work: Work) -> None:
        """At the end of its user's queue."""
        self._queues.setdefault(work.user, deque()).append(work)
        self._length += 1

    def remove(self, work: Work) -> bool:
        """Take it out; whether it was here."""
        queue = self._queues.get(work.user)
        if queue is None or work not in queue:
            return False
        queue.remove(work)
        self._length -= 1
        if not queue:
            del self._queues[work.user]
        return True

    def in_turn(self) -> Iterator[Work]:
        """All that waits, whose turn it is first: the least served user's, of equals who has fewest running."""
        users = list(self._queues)  # by arrival: the sort is stable
        users.sort(key=lambda user: (self._shares.served(user), self._shares.running[user]))
        for user in users:
            yield from list(self._queues.get(user, ()))
