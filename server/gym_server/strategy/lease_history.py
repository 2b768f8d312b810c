"""How long contributors take for a task: what each one's own leases show, whether or not they were merged.

A lease that was answered shows it, in time or too late. One that the end of its round cut off shows it by its last
heartbeat: the seconds so far, and how many of the training steps were done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Select, and_, or_, select

from gym_fed.errors import ErrorCode
from gym_fed.text import whole_number
from gym_server.rounds.queue import LATE
from gym_server.rounds.round_store import ABORTED, COMMITTED
from gym_server.store.tables import messages, nodes, round_tasks, rounds, updates

LEARNED_ROUNDS = 10
MAX_UNANSWERED = 3
"""Tasks in a row that a contributor may leave unanswered before rounds stop waiting for it."""

_TRAINING = "train"


@dataclass(frozen=True)
class OpenTask:
    """A task of the round that is under way.

    Attributes:
        contributor: Whose; the node's number where no account is known, as on a stock Flower grid.
        outcome: Empty while it is open.
        given_at: When it was handed out, in the hub's time; None where the queue does not know it.
        projected_seconds: How long it takes by its own heartbeats; None before the first step.
    """

    message_id: str
    contributor: str
    outcome: str
    given_at: float | None
    projected_seconds: float | None


@dataclass
class Leases:
    """What the past tasks of one contributor show, the latest last."""

    seconds: list[float] = field(default_factory=list)
    """Of those that it answered or that its heartbeats measure."""
    unanswered: int = 0
    """How many of the last ones in a row it left unanswered until their round ended."""

    @property
    def is_awaited(self) -> bool:
        """Whether rounds wait for it beyond the least grace period."""
        return self.unanswered < MAX_UNANSWERED


def open_tasks(tx: Connection, server_round: int, lease_seconds: float) -> list[OpenTask]:
    """The tasks of a round."""
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


def lease_histories(tx: Connection, server_round: int, lease_seconds: float) -> Mapping[str, Leases]:
    """What the tasks of the rounds before this one show, by contributor."""
    last = (
        select(rounds.c.server_round)
        .where(rounds.c.state.in_((COMMITTED, ABORTED)), rounds.c.server_round < server_round)
        .order_by(rounds.c.server_round.desc())
        .limit(LEARNED_ROUNDS)
    )
    found: dict[str, Leases] = {}
    query = _tasks().where(round_tasks.c.server_round.in_(last)).order_by(round_tasks.c.server_round)
    for row in tx.execute(query):
        leases = found.setdefault(row.contributor or str(row.node_id), Leases())
        if row.received_at is not None and row.created_at is not None:
            leases.seconds.append(max(0.0, row.received_at - row.created_at))
            leases.unanswered = 0
        elif row.state == LATE:
            leases.unanswered += 1
            projected = _projected(row, lease_seconds)
            if projected is not None:
                leases.seconds.append(projected)
    return found


def expected_seconds(task: OpenTask, leases: Leases) -> float | None:
    """How long an open task takes by the contributor's own leases and this one's heartbeats; None: nothing is known."""
    now = () if task.projected_seconds is None else (task.projected_seconds,)
    return max((*leases.seconds, *now), default=None)


def _tasks() -> Select[Any]:
    # An update that came too late counts as much as one that was merged; one that was refused for itself does not.
    counts = and_(
        updates.c.message_id == round_tasks.c.message_id,
        or_(updates.c.verdict != "refused", updates.c.code == ErrorCode.STALE.value),
    )
    return (
        select(
            round_tasks.c.node_id,
            round_tasks.c.message_id,
            round_tasks.c.outcome,
            nodes.c.contributor,
            messages.c.created_at,
            messages.c.state,
            messages.c.progress,
            messages.c.lease_until,
            updates.c.received_at,
        )
        .outerjoin(messages, messages.c.message_id == round_tasks.c.message_id)
        .outerjoin(nodes, nodes.c.node_id == round_tasks.c.node_id)
        .outerjoin(updates, counts)
    )


def _projected(row: Any, lease_seconds: float) -> float | None:
    """Seconds that a task takes by its last heartbeat, ``train 30/300``; None where that says nothing yet."""
    phase, _, steps = str(row.progress or "").partition(" ")
    done, total = (whole_number(text, 12) or 0 for text in (*steps.partition("/")[::2],))
    if phase != _TRAINING or not 0 < done <= total:
        return None
    heard_at = float(row.lease_until) - lease_seconds
    return max(0.0, heard_at - float(row.created_at)) * total / done
