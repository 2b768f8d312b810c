"""How often one account may write to the ledger, which everybody keeps for good.

The count is the ledger's own, so that it outlives restarts and needs no memory.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from sqlalchemy import Connection, select

from gym_fed.errors import ErrorCode, GymError
from gym_server.store.tables import ledger, ledger_subjects

HOUR_SECONDS = 3600


def require_pace(
    tx: Connection, contributor: str, kinds: Collection[str], most: int, now: float, what: str
) -> None:
    """Whether an account may have another entry of some kinds, which nobody but the account can bring about.

    Args:
        tx: The caller's transaction.
        contributor: Whose entries are counted.
        kinds: Of the entries; together they have one share.
        most: Entries within an hour.
        now: Unix seconds.
        what: What the account did so often, as ``changed its variants``.

    Raises:
        GymError: ``BUSY`` with the minutes to wait.
    """
    told = (
        select(ledger.c.body)
        .join(ledger_subjects, ledger_subjects.c.sequence == ledger.c.sequence)
        .where(ledger_subjects.c.contributor == contributor, ledger.c.kind.in_(kinds))
        .order_by(ledger.c.sequence.desc())
    )
    earliest = tx.scalar(told.offset(most - 1).limit(1))
    if earliest is None:
        return
    wait = json.loads(earliest)["at"] + HOUR_SECONDS - now
    if wait > 0:
        raise GymError(
            ErrorCode.BUSY,
            f"{contributor} {what} {most} times within an hour",
            f"try again in {wait / 60:.0f} minutes",
        )
