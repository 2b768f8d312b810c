"""Signed commitments to uploads: the digests that accounts declared, and when."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, func, select

from gym_fed.trust.identity.commitment import UploadCommitment
from gym_fed.trust.identity.keys import SigningKey
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import commitments

MAX_KEPT = 1000
"""Maximum number of commitments per account, of which a round needs one; the oldest are deleted first."""


class Commitments:
    """The commitments of one hub.

    Args:
        key: The ledger's key, which signs commitments.
        server: Id of the hub.
        clock: The hub's clock, Unix seconds, which also determines the order of updates.
    """

    def __init__(self, key: SigningKey, server: str, clock: Callable[[], float]) -> None:
        self._key, self._server, self._clock = key, server, clock

    def commit(self, tx: Connection, contributor: str, sha256: str) -> str:
        """Record that an account declares a digest, in the caller's transaction; a repeated declaration changes
        nothing.

        Returns:
            The signed statement, with the time of the first declaration.
        """
        mine, now = commitments.c.contributor == contributor, self._clock()
        insert_if_absent(tx, commitments, contributor=contributor, sha256=sha256, committed_at=now)
        count = int(tx.scalar(select(func.count()).select_from(commitments).where(mine)) or 0)
        if count > MAX_KEPT:
            oldest = select(commitments.c.sha256).where(mine).order_by(commitments.c.committed_at)
            drop = tx.scalars(oldest.limit(count - MAX_KEPT)).all()
            tx.execute(commitments.delete().where(mine, commitments.c.sha256.in_(drop)))
        at = committed_at(tx, contributor, sha256) or now
        return UploadCommitment(self._server, contributor, sha256, int(at)).signed(self._key)


def committed_at(tx: Connection, contributor: str, sha256: str) -> float | None:
    """Return the time at which the account declared the digest, in Unix seconds; None if it did not."""
    where = (commitments.c.contributor == contributor) & (commitments.c.sha256 == sha256)
    found = tx.scalar(select(commitments.c.committed_at).where(where))
    return None if found is None else float(found)
