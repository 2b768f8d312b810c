"""The time of a ledger entry: whole seconds, or in private rounds an hour that says little about who sent when.

Entries about the updates of a private round have the hour in which the round was opened (what is written while it
collects) or in which it ended. Everything else keeps its second: keys and transfers, since their hold periods rest
on it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from gym_fed.ledger.seals import SEALED
from gym_server.store.tables import rounds

BUCKET_SECONDS = 3600
BUCKET = "at_bucket_seconds"
"""Key of an entry whose time is the beginning of a span of so many seconds."""

_AT_THE_DOOR = ("admitted", "refused")
_OF_ROUNDS = frozenset(
    {SEALED, "verdict", "version", "aborted", "credit", "contribution", "privacy", "refused-summary"}
)


def stamp(tx: Connection, kind: str, body: dict[str, Any], now: float, private: bool) -> dict[str, int]:
    """The keys of an entry that say when it was written.

    Args:
        tx: The transaction that writes it.
        kind: The entry's kind.
        body: Its body so far.
        now: Unix seconds.
        private: Whether the hub's rounds are private.

    Returns:
        ``at``, and ``at_bucket_seconds`` where that is not to the second.
    """
    if not private or kind not in _OF_ROUNDS:
        return {"at": int(now)}
    if kind == SEALED or body.get("verdict") in _AT_THE_DOOR:
        opened = tx.scalar(
            select(rounds.c.opened_at).where(rounds.c.server_round == body.get("server_round"))
        )
        now = now if opened is None else min(now, opened)
    return {"at": int(now) // BUCKET_SECONDS * BUCKET_SECONDS, BUCKET: BUCKET_SECONDS}
