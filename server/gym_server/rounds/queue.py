"""The message queue between the grid and the nodes: messages are pushed, leased, answered or lost.

A message becomes ``lost`` if its node disconnects or its lease is not renewed, so that no round waits for a contributor
that left. A node that returns in time gets its message again. A message that is still open when its round continues
becomes ``late``. A stored reply that cannot be read becomes ``set-aside`` and is not read again.

An account is one participant, even with several installations (up to a limit). The grid sees it as the node that holds
a task.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, or_, select, update

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_server.store.database import Database, chunks, rerun
from gym_server.store.tables import accounts, messages, nodes, round_tasks, rounds

LOST, LATE, SET_ASIDE = "lost", "late", "set-aside"
_OVER = (LOST, LATE)
"""Final states of a message that was not answered."""


@dataclass(frozen=True)
class NewMessage:
    """A message to queue, with fields named after the columns; ``content`` is serialised protobuf."""

    node_id: int
    group_id: str
    message_type: str
    created_at: float
    ttl_seconds: float
    content: bytes


@dataclass(frozen=True)
class QueuedMessage(NewMessage):
    """A row of the queue; ``reply`` is serialised protobuf."""

    message_id: str
    state: str
    reply: bytes | None


_MOST_GIVEN_BACK = 3
"""Maximum number of lost tasks per account and round; an account that declines another is not asked again."""
_MAX_NAME = 40
_MAX_OWN_NODE = 2**63
"""Upper limit of the hub's own node ids, which must fit into SQLite's signed integers."""

_OPEN = messages.c.state.in_(("queued", "leased"))
_COLUMNS = [messages.c[field.name] for field in fields(QueuedMessage)]


class MessageQueue:
    """The messages of one hub, in the table ``messages``.

    Args:
        database: The hub's database.
        lease_seconds: Duration of a lease without renewal.
        clock: The hub's clock, Unix seconds.
    """

    def __init__(
        self, database: Database, lease_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self.lease_seconds = lease_seconds
        self.now = clock

    def node_ids(self) -> list[int]:
        """Return one node of every account that is connected or has a lease: the one with a task, else the first."""
        now = self.now()
        open_task = _OPEN & (messages.c.lease_until > now)
        with self._database.reading() as tx:
            rows = tx.execute(
                select(nodes.c.node_id, nodes.c.contributor, nodes.c.connected_until)
                .join(accounts, accounts.c.contributor == nodes.c.contributor)
                .where(accounts.c.status == "active")
                .where((nodes.c.connected_until > now) | nodes.c.node_id.in_(_nodes_with(open_task)))
            ).all()
            busy = set(tx.scalars(_nodes_with(open_task)))
            leased = set(tx.scalars(_nodes_with(open_task & (messages.c.state == "leased"))))
        found: dict[str, tuple[tuple[bool, bool, int], int]] = {}
        for row in rows:
            if row.connected_until <= now and row.node_id not in leased:
                continue
            rank = (row.node_id not in leased, row.node_id not in busy, row.node_id)
            found[row.contributor] = min(found.get(row.contributor, (rank, row.node_id)), (rank, row.node_id))
        return sorted(node_id for _, node_id in found.values())

    def accounts_of(self, node_ids: Iterable[int]) -> dict[int, str]:
        """Return the account of each known node. On a stock Flower grid, nodes have no account."""
        mine = [node_id for node_id in node_ids if node_id < _MAX_OWN_NODE]
        with self._database.reading() as tx:
            rows = tx.execute(
                select(nodes.c.node_id, nodes.c.contributor).where(nodes.c.node_id.in_(mine))
            ).all()
            return {int(row.node_id): str(row.contributor) for row in rows}

    def push(
        self,
        node_id: int,
        group_id: str,
        message_type: str,
        created_at: float,
        ttl_seconds: float,
        content: bytes,
    ) -> str:
        """Queue one message and return its id; see ``push_all``."""
        (message_id,) = self.push_all(
            [NewMessage(node_id, group_id, message_type, created_at, ttl_seconds, content)]
        )
        return message_id

    @rerun
    def push_all(self, new: Sequence[NewMessage]) -> list[str]:
        """Queue messages in one transaction and return their ids.

        A message that exists with the same content, node and group, and is neither lost nor late, is reused.
        """
        with self._database.transaction() as tx:
            return [self._push(tx, message) for message in new]

    def _push(self, tx: Connection, new: NewMessage) -> str:
        parts = (str(new.node_id).encode(), new.group_id.encode(), new.message_type.encode(), new.content)
        fingerprint = hashlib.sha256(b"\0".join(parts)).hexdigest()
        where = (messages.c.fingerprint == fingerprint) & messages.c.state.not_in(_OVER)
        found = tx.scalar(select(messages.c.message_id).where(where))
        if found is not None:
            return str(found)
        message_id = secrets.token_hex(16)
        tx.execute(
            messages.insert().values(
                **asdict(new),
                message_id=message_id,
                fingerprint=fingerprint,
                state="queued",
                lease_until=self.now() + self.lease_seconds,
            )
        )
        return message_id

    def held(self, node_id: int) -> QueuedMessage | None:
        """Return the message that is leased to the node."""
        with self._database.reading() as tx:
            return _message(tx, _of(node_id, "leased"))

    @rerun
    def lease(self, node_id: int) -> QueuedMessage | None:
        """Lease the next message to a node; None if the node already has a lease or there is no message."""
        self.expire(node_id)  # only this node's: a thousand nodes ask at once when a round opens
        with self._database.reading() as tx:  # the common case, without the write lock
            if _message(tx, _of(node_id, "queued")) is None:
                return None
        with self._database.transaction() as tx:
            if _message(tx, _of(node_id, "leased")) is not None:
                return None
            found = _message(tx, _of(node_id, "queued"))
            if found is None:
                return None
            tx.execute(
                update(messages)
                .where(messages.c.message_id == found.message_id)
                .values(state="leased", lease_until=self.now() + self.lease_seconds)
            )
        return replace(found, state="leased")

    @rerun
    def renew(self, message_id: str, node_id: int, progress: str) -> None:
        """Renew a lease; do nothing if it ended because the node answered.

        Raises:
            GymError: ``LEASE_LOST`` if the node does not hold the message.
        """
        with self._database.transaction() as tx:
            answered = (messages.c.node_id == node_id) & messages.c.state.in_(("replied", SET_ASIDE))
            if tx.scalar(select(messages.c.message_id).where(messages.c.message_id == message_id, answered)):
                return
            check_held(tx, message_id, node_id)
            tx.execute(
                update(messages)
                .where(messages.c.message_id == message_id)
                .values(lease_until=self.now() + self.lease_seconds, progress=progress)
            )

    @rerun
    def expire(self, node_id: int | None = None) -> None:
        """Mark unattended messages, of one node or all, as ``lost``; messages of connected nodes stay queued."""
        now = self.now()
        mine = _OPEN if node_id is None else _OPEN & (messages.c.node_id == node_id)
        ends = or_(messages.c.lease_until < now, messages.c.created_at + messages.c.ttl_seconds < now)
        waiting = mine & ends
        with self._database.reading() as tx:
            if tx.scalar(select(messages.c.message_id).where(waiting).limit(1)) is None:
                return
        with self._database.transaction() as tx:
            connected = select(nodes.c.node_id).where(nodes.c.connected_until > now)
            picked_up_later = (messages.c.state == "queued") & messages.c.node_id.in_(connected)
            alive = messages.c.created_at + messages.c.ttl_seconds >= now
            tx.execute(update(messages).where(waiting, ~(picked_up_later & alive)).values(state="lost"))

    def close_group(self, group_id: str) -> int:
        """Withdraw the open tasks of a round, including carried ones; return their number."""
        return self._close(_of_group(group_id))

    @staticmethod
    def close_group_in(tx: Connection, group_id: str) -> None:
        """Like ``close_group``, inside the caller's transaction."""
        tx.execute(update(messages).where(_of_group(group_id), _OPEN).values(state=LATE))

    def close(self, message_ids: Iterable[str]) -> int:
        """Withdraw the given messages that are still open; return their number."""
        return self._close(messages.c.message_id.in_(list(message_ids)))

    def name_of(self, node_id: int) -> str:
        """Return the name of the account of a node, for logs."""
        query = (
            select(accounts.c.name)
            .join(nodes, nodes.c.contributor == accounts.c.contributor)
            .where(nodes.c.node_id == node_id)
        )
        with self._database.reading() as tx:
            name = None if node_id >= _MAX_OWN_NODE else tx.scalar(query)
        return f"node {node_id}" if name is None else plain(name, _MAX_NAME)

    @staticmethod
    def give_back(tx: Connection, message: QueuedMessage) -> bool:
        """Mark a declined task as lost, so that its contributor is asked again, for example after consent.

        Returns:
            False, without any change, if its account has lost ``_MOST_GIVEN_BACK`` tasks of the round already.
        """
        account = select(nodes.c.contributor).where(nodes.c.node_id == message.node_id).scalar_subquery()
        siblings = select(nodes.c.node_id).where(nodes.c.contributor == account)
        mine = messages.c.node_id.in_(siblings) & (messages.c.group_id == message.group_id)
        lost = select(func.count()).select_from(messages).where(mine, messages.c.state == LOST)
        if int(tx.scalar(lost) or 0) >= _MOST_GIVEN_BACK:
            return False
        tx.execute(update(messages).where(messages.c.message_id == message.message_id).values(state=LOST))
        return True

    def set_aside(self, tx: Connection, message_id: str, reason: str) -> None:
        """Exclude a reply from further reading, but keep its bytes; if it is resent, the receipt is the verdict."""
        receipt = json.dumps({"verdict": SET_ASIDE, "reason": reason})
        this = update(messages).where(messages.c.message_id == message_id)
        tx.execute(this.values(state=SET_ASIDE, receipt=receipt))

    @rerun
    def _close(self, which: ColumnElement[bool]) -> int:
        with self._database.transaction() as tx:
            return int(tx.execute(update(messages).where(which, _OPEN).values(state=LATE)).rowcount)

    def get(self, message_id: str) -> QueuedMessage | None:
        with self._database.reading() as tx:
            return _message(tx, select(*_COLUMNS).where(messages.c.message_id == message_id))

    def ended(self, message_ids: Iterable[str]) -> list[str]:
        """Return the given messages that are neither queued nor leased, after marking unattended ones as lost."""
        self.expire()
        query, found = select(messages.c.message_id).where(~_OPEN), list[str]()
        with self._database.reading() as tx:
            for some in chunks(message_ids):
                found.extend(tx.scalars(query.where(messages.c.message_id.in_(some))))
        return found


def check_held(tx: Connection, message_id: str, node_id: int) -> None:
    """Raise ``LEASE_LOST`` or ``PERMISSION_DENIED`` unless ``node_id`` holds the message."""
    row = tx.execute(
        select(messages.c.node_id, messages.c.state).where(messages.c.message_id == message_id)
    ).first()
    if row is None:
        raise GymError(ErrorCode.NOT_FOUND, f"no task {message_id}")
    if row.node_id != node_id:
        raise GymError(ErrorCode.PERMISSION_DENIED, f"task {message_id} belongs to another node")
    if row.state == LATE:
        raise GymError(
            ErrorCode.LEASE_LOST,
            f"task {message_id} is late: its round continued without it",
            "wait for the next round",
        )
    if row.state != "leased":
        raise GymError(ErrorCode.LEASE_LOST, f"task {message_id} is {row.state}", "wait for the next round")


def record_reply(tx: Connection, message_id: str, reply: bytes, receipt: str, now: float) -> None:
    """Mark a message as answered at the hub's time ``now``, inside the caller's transaction."""
    tx.execute(
        update(messages)
        .where(messages.c.message_id == message_id)
        .values(state="replied", reply=reply, receipt=receipt, replied_at=now)
    )


def _of_group(group_id: str) -> ColumnElement[bool]:
    """Select a round's messages, including those that a continuous round carries from earlier ones."""
    of_round = messages.c.group_id == group_id
    if group_id.isdecimal():
        carried = round_tasks.c.server_round == int(group_id)
        of_round |= messages.c.message_id.in_(select(round_tasks.c.message_id).where(carried))
    return of_round


def _nodes_with(which: ColumnElement[bool]) -> Select[tuple[int]]:
    return select(messages.c.node_id).where(which).distinct()


def _message(tx: Connection, query: Select[Any]) -> QueuedMessage | None:
    row = tx.execute(query).first()
    return None if row is None else QueuedMessage(*row)


def _of(node_id: int, state: str) -> Select[Any]:
    return (
        select(*_COLUMNS)
        .where(messages.c.node_id == node_id, messages.c.state == state)
        .order_by(messages.c.created_at)
        .limit(1)
    )


def disconnect(tx: Connection, contributor: str) -> None:
    """Disconnect an account's nodes, and mark their open messages as lost."""
    mine = nodes.c.contributor == contributor
    tx.execute(update(nodes).where(mine).values(connected_until=0.0))
    held = messages.c.node_id.in_(select(nodes.c.node_id).where(mine))
    tx.execute(update(messages).where(held, _OPEN).values(state=LOST))


def node_of(tx: Connection, contributor: str, instance: str, most: int, now: float) -> int:
    """Return the node id of an account's installation; beyond the limit, a new node replaces the longest idle one.

    Args:
        tx: The caller's transaction.
        contributor: Name of the account.
        instance: Id that the installation has chosen.
        most: Maximum number of nodes per account.
        now: The hub's time, Unix seconds.

    Raises:
        GymError: ``QUOTA_EXCEEDED`` if too few of the other nodes are idle.
    """
    mine = nodes.c.contributor == contributor
    found = tx.scalar(select(nodes.c.node_id).where(mine, nodes.c.instance == instance))
    if found is not None:
        return int(found)
    too_many = int(tx.scalar(select(func.count()).select_from(nodes).where(mine)) or 0) + 1 - most
    forgotten = _idle(tx, contributor, too_many, now) if too_many > 0 else []
    if len(forgotten) < too_many:
        raise GymError(
            ErrorCode.QUOTA_EXCEEDED,
            f"{contributor} has {counted(most, 'installation')} at work, the limit per account on this hub",
            "stop one of them, or ask the coordinator for a higher limits.nodes_per_account",
        )
    # Insert the new row before deleting old ones, so that SQLite does not reuse their ids.
    result = tx.execute(nodes.insert().values(contributor=contributor, instance=instance))
    new = int(result.inserted_primary_key[0])  # type: ignore[index]
    for node_id in forgotten:
        _hand_over_tasks(tx, node_id, new)
    if forgotten:
        tx.execute(delete(nodes).where(nodes.c.node_id.in_(forgotten)))
    return new


def _hand_over_tasks(tx: Connection, node_id: int, new: int) -> None:
    """Move a deleted node's lost tasks, and all its tasks of ended rounds, to a new node of the account.

    Otherwise an account could erase its record of unanswered tasks by enrolling new installations.
    """
    lost = (messages.c.node_id == node_id) & (messages.c.state == LOST)
    tx.execute(update(messages).where(lost).values(node_id=new))
    ended = select(rounds.c.server_round).where(rounds.c.state.in_(("committed", "aborted")))
    taken = select(round_tasks.c.server_round).where(round_tasks.c.node_id == new)
    mine = (round_tasks.c.node_id == node_id) & round_tasks.c.server_round.in_(ended)
    tx.execute(update(round_tasks).where(mine, round_tasks.c.server_round.not_in(taken)).values(node_id=new))


def _idle(tx: Connection, contributor: str, most: int, now: float) -> list[int]:
    """Return up to ``most`` nodes without connection or open message, longest idle first."""
    at_work = select(messages.c.node_id).where(_OPEN)
    away = (nodes.c.contributor == contributor) & (nodes.c.connected_until <= now)
    rows = tx.scalars(
        select(nodes.c.node_id)
        .where(away, nodes.c.node_id.not_in(at_work))
        .order_by(nodes.c.connected_until, nodes.c.node_id)
        .limit(most)
    )
    return [int(row) for row in rows]
