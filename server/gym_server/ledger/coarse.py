"""The time of a ledger entry: whole seconds, or in private rounds a span that says little about who sent when.

What is written at the door of a private round has the hours from its opening to its deadline, and what comes later, or
ends the round, the hour that it is. Everything else keeps its second: keys and transfers, since their hold periods rest
on it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from gym_fed.ledger.entries import SEALED
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
        of_round = rounds.c.server_round == body.get("server_round")
        row = tx.execute(select(rounds.c.opened_at, rounds.c.deadline).where(of_round)).first()
        if row is not None and row.deadline is not None and row.opened_at <= now <= row.deadline:
            return _span(row.opened_at, row.deadline)
    return _span(now, now)


def _span(first: float, last: float) -> dict[str, int]:
    """The whole hours that two times are in, and those between."""
    begin, end = (int(seconds) // BUCKET_SECONDS * BUCKET_SECONDS for seconds in (first, last))
    return {"at": begin, BUCKET: end + BUCKET_SECONDS - begin}
