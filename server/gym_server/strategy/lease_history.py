"""Read the history of contributors' tasks: their durations, and which were left unanswered.

The duration of an answered task is known, even if the answer was late. For a task that was cut off by the end of its
round, it is estimated from the last heartbeat: the seconds so far and the share of training steps done.

A round needs answers from more than half of the active contributors, so accounts that never answer could block every
round. An account blocks a round if it still holds the task when the round ends at the deadline without a quorum. Each
blocked round doubles the number of answers that an account needs, so that it cannot compensate for blocking by
answering in between. Accounts with fewer answers share one count of blocked rounds; otherwise new accounts could block
rounds forever. Being late in a merged round does not count as blocking; otherwise fast accounts could remove slow ones
from the quorum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sqlalchemy import Column, Connection, Select, String, and_, cast, func, or_, select

from gym_fed.core.errors import ErrorCode
from gym_fed.core.text import whole_number
from gym_server.rounds.queue import LATE, LOST
from gym_server.rounds.round_store import ABORTED, COMMITTED
from gym_server.store.tables import messages, nodes, round_tasks, rounds, updates

LEARNED_ROUNDS = 10
"""Number of latest rounds from which durations and unanswered tasks are read."""
REMEMBERED_ROUNDS = 100
"""Number of latest rounds in which answers and blocked rounds count."""
MAX_UNANSWERED = 3
"""Number of consecutive unanswered tasks after which rounds no longer wait for a contributor."""
MAX_BLOCKED_ROUNDS = 3
"""Number of remembered rounds that accounts that are not established may block together."""
MIN_ANSWERS = 3
"""Number of answers that an account needs to be established, doubled for each round that it blocked."""

_TRAINING = "train"


@dataclass(frozen=True)
class OpenTask:
    """A task of the current round.

    Attributes:
        contributor: Account that holds the task; the node id if there is no account, as on a stock Flower grid.
        outcome: Empty while the task is open.
        given_at: Time at which it was handed out, Unix seconds by the hub's clock; None if unknown.
        projected_seconds: Total duration estimated from its heartbeats; None before the first step.
    """

    message_id: str
    contributor: str
    outcome: str
    given_at: float | None
    projected_seconds: float | None


@dataclass
class TaskRecord:
    """The earlier tasks of one contributor.

    Attributes:
        seconds: Durations of tasks that were answered or measured by heartbeats.
        slowest_answer: Longest duration of a task that was answered, in time or late; 0 without an answer.
        unanswered: Number of consecutive latest tasks that were unanswered when their round ended.
        num_answers: Number of rounds answered in time, with an update that was neither refused nor rejected. Answers in
            aborted rounds count, so that blocked rounds do not penalise the accounts that answer.
        blocked: Rounds that ended at the deadline without a quorum while the contributor held a task.
    """

    seconds: list[float] = field(default_factory=list)
    slowest_answer: float = 0.0
    unanswered: int = 0
    num_answers: int = 0
    blocked: set[int] = field(default_factory=set)

    @property
    def is_awaited(self) -> bool:
        """Return True if rounds wait for the contributor beyond the minimum grace period."""
        return self.unanswered < MAX_UNANSWERED

    @property
    def is_established(self) -> bool:
        """Return True if the contributor counts in the quorum because of its own record."""
        return self.num_answers >= MIN_ANSWERS << len(self.blocked)


@dataclass
class LeaseHistory:
    """The tasks of the rounds before a given one.

    Attributes:
        by_contributor: The record of each contributor.
    """

    by_contributor: dict[str, TaskRecord] = field(default_factory=dict)

    @cached_property
    def blocked_by_others(self) -> set[int]:
        """Return the rounds blocked by contributors that are not established."""
        return set[int]().union(*(r.blocked for r in self.by_contributor.values() if not r.is_established))

    def of(self, task: OpenTask) -> TaskRecord:
        """Return the record of the contributor that holds a task."""
        return self.by_contributor.get(task.contributor, TaskRecord())

    def counts(self, task: OpenTask) -> bool:
        """Return True if a task's holder counts in the quorum: it has answered, or is expected to answer."""
        if task.outcome:
            return task.outcome == "replied"
        return self.of(task).is_established or len(self.blocked_by_others) < MAX_BLOCKED_ROUNDS

    def num_counted(self, tasks: Sequence[OpenTask]) -> int:
        """Return the number of contributors that count in the quorum."""
        return sum(self.counts(task) for task in tasks)


class LeaseHistoryCache:
    """A cache of the history before a round, which does not change."""

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._newest = (0, LeaseHistory())

    def before(self, tx: Connection, server_round: int) -> LeaseHistory:
        """Return the history before a round."""
        number, history = self._newest
        if number != server_round:
            history = lease_history(tx, server_round, self.lease_seconds)
            self._newest = (server_round, history)
        return history

    def num_counted(self, tx: Connection, server_round: int) -> int:
        """Return the number of contributors that count in the quorum of the current round."""
        return self.before(tx, server_round).num_counted(open_tasks(tx, server_round, self.lease_seconds))


def open_tasks(tx: Connection, server_round: int, lease_seconds: float) -> list[OpenTask]:
    """Read the tasks of a round."""
    rows = tx.execute(_tasks().where(round_tasks.c.server_round == server_round))
    return [
        OpenTask(
            row.message_id,
            row.contributor or str(row.node_id),
            row.outcome,
            row.created_at,
            _projected(row, lease_seconds),
        )
        for row in rows
    ]


def resting_contributors(tx: Connection, server_round: int, lease_seconds: float, now: float) -> set[str]:
    """Return the contributors that must wait before they get a round's task again, since they lost it several times.

    After the second loss, an account waits for the duration of one lease, and then about twice as long after each
    further loss by any of its nodes. A hub that is too slow to answer heartbeats therefore does not add to its load by
    handing out the same tasks repeatedly. On a stock Flower grid, each node counts separately, under its id.

    Args:
        tx: A transaction.
        server_round: The current round.
        lease_seconds: Duration of a lease without renewal.
        now: The hub's time, Unix seconds.
    """
    lost = (messages.c.state == LOST) & (messages.c.group_id == str(server_round))
    who = func.coalesce(nodes.c.contributor, cast(messages.c.node_id, String)).label("who")
    last = func.max(messages.c.lease_until).label("last")
    query = select(who, last, func.count().label("times")).select_from(
        messages.outerjoin(nodes, nodes.c.node_id == messages.c.node_id)
    )
    rows = tx.execute(query.where(lost, messages.c.lease_until <= now).group_by(who))
    return {row.who for row in rows if now < row.last + lease_seconds * (2 ** (min(row.times, 30) - 1) - 1)}


def lease_history(tx: Connection, server_round: int, lease_seconds: float) -> LeaseHistory:
    """Read the tasks of the rounds before ``server_round``."""
    over = rounds.c.state.in_((COMMITTED, ABORTED)) & (rounds.c.server_round < server_round)
    last = select(rounds).where(over).order_by(rounds.c.server_round.desc()).limit(REMEMBERED_ROUNDS)
    blocked = {row.server_round: _ended_without_quorum(row) for row in tx.execute(last)}
    learned = set(list(blocked)[:LEARNED_ROUNDS])
    history = LeaseHistory()
    # Includes late updates, which are refused as stale, but not updates refused for their content.
    of_task = and_(
        updates.c.message_id == round_tasks.c.message_id,
        or_(updates.c.verdict != "refused", updates.c.code == ErrorCode.STALE.value),
    )
    query = (
        _tasks(updates.c.received_at, updates.c.verdict)
        .outerjoin(updates, of_task)
        .where(round_tasks.c.server_round.in_(list(blocked)))
        .order_by(round_tasks.c.server_round)
    )
    last_rows: dict[str, Any] = {}  # a carried task has a row in each of its continuous rounds
    for row in tx.execute(query):
        last_rows.pop(row.message_id, None)
        last_rows[row.message_id] = row
    for row in last_rows.values():
        record = history.by_contributor.setdefault(row.contributor or str(row.node_id), TaskRecord())
        is_late, is_learned = row.state == LATE, row.server_round in learned
        if row.received_at is not None and row.created_at is not None:
            if is_learned:
                record.seconds.append(max(0.0, row.received_at - row.created_at))
                record.slowest_answer = max(record.slowest_answer, record.seconds[-1])
            record.unanswered = 0
            record.num_answers += not is_late and row.verdict != "rejected"
        elif is_late and is_learned:
            record.unanswered += 1
            projected = _projected(row, lease_seconds)
            if projected is not None:
                record.seconds.append(projected)
        if is_late and blocked[row.server_round]:
            record.blocked.add(row.server_round)
    return history


def _ended_without_quorum(row: Any) -> bool:
    """Return True if a round collected until its deadline and was not merged."""
    is_unmerged = row.state == ABORTED and row.merging is None
    return is_unmerged and row.deadline is not None and float(row.closed_at or 0.0) >= float(row.deadline)


def expected_seconds(task: OpenTask, record: TaskRecord) -> float | None:
    """Estimate an open task's duration from its heartbeats and the contributor's earlier tasks; None if unknown."""
    now = () if task.projected_seconds is None else (task.projected_seconds,)
    return max((*record.seconds, *now), default=None)


def _tasks(*more: Column[Any]) -> Select[Any]:
    return (
        select(
            round_tasks.c.server_round,
            round_tasks.c.node_id,
            round_tasks.c.message_id,
            round_tasks.c.outcome,
            nodes.c.contributor,
            messages.c.created_at,
            messages.c.state,
            messages.c.progress,
            messages.c.lease_until,
            *more,
        )
        .outerjoin(messages, messages.c.message_id == round_tasks.c.message_id)
        .outerjoin(nodes, nodes.c.node_id == round_tasks.c.node_id)
    )


def _projected(row: Any, lease_seconds: float) -> float | None:
    """Estimate a task's duration in seconds from its last heartbeat (``train 30/300``); None before the first step."""
    phase, _, steps = str(row.progress or "").partition(" ")
    done, total = (whole_number(text, 12) or 0 for text in (*steps.partition("/")[::2],))
    if phase != _TRAINING or not 0 < done <= total:
        return None
    heard_at = float(row.lease_until) - lease_seconds
    return max(0.0, heard_at - float(row.created_at)) * total / done
