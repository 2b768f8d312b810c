"""Nodes: the installations of an account, of which it has a few."""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, func, select

from gym_fed.errors import ErrorCode, GymError
from gym_server.store.tables import messages, nodes


def node_of(tx: Connection, contributor: str, instance: str, most: int) -> int:
    """The id of an account's installation; a new one takes the place of the one that was idle for longest.

    Args:
        tx: The caller's transaction.
        contributor: Whose it is.
        instance: What the installation calls itself.
        most: How many an account may have.

    Raises:
        GymError: ``QUOTA_EXCEEDED`` when all of the others are at work.
    """
    mine = nodes.c.contributor == contributor
    found = tx.scalar(select(nodes.c.node_id).where(mine, nodes.c.instance == instance))
    if found is not None:
        return int(found)
    too_many = int(tx.scalar(select(func.count()).select_from(nodes).where(mine)) or 0) + 1 - most
    forgotten = _idle(tx, contributor, too_many) if too_many > 0 else []
    if len(forgotten) < too_many:
        raise GymError(
            ErrorCode.QUOTA_EXCEEDED,
            f"{most} installations of {contributor} are at work, as many as this hub lets one account have",
            "stop one of them, or ask the coordinator for a higher limits.nodes_per_account",
        )
    # The new row comes before the old ones go, so that SQLite gives it a number that none of them had.
    result = tx.execute(nodes.insert().values(contributor=contributor, instance=instance))
    if forgotten:
        tx.execute(delete(nodes).where(nodes.c.node_id.in_(forgotten)))
    return int(result.inserted_primary_key[0])  # type: ignore[index]


def _idle(tx: Connection, contributor: str, most: int) -> list[int]:
    """Nodes that are not connected and have nothing to do, the one that was idle for longest first."""
    at_work = select(messages.c.node_id).where(messages.c.state.in_(("queued", "leased")))
    rows = tx.scalars(
        select(nodes.c.node_id)
        .where(
            nodes.c.contributor == contributor,
            nodes.c.connected_until <= time.time(),
            nodes.c.node_id.not_in(at_work),
        )
        .order_by(nodes.c.connected_until, nodes.c.node_id)
        .limit(most)
    )
    return [int(row) for row in rows]
