"""What the hold period rests on, against the ledger: keys with their times, and when transfers were asked for.

A row has the clock's time and its entry whole seconds, both taken in one transaction, so that they differ by little;
the end of a private round is in the ledger by its hour.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from gym_fed.identity.history import History
from gym_fed.ledger.entries import corrupt
from gym_server.ledger.coarse import BUCKET
from gym_server.store.tables import account_keys, accounts, rounds, royalties, transfers

SLACK_SECONDS = 60.0


class Times:
    """When rounds ended and royalties were recorded; shown every entry."""

    def __init__(self) -> None:
        self._rounds: dict[int, tuple[int, int]] = {}
        self._royalties: dict[str, int] = {}

    def add(self, kind: str, body: dict[str, Any]) -> None:
        """The next entry."""
        if kind in ("version", "aborted"):
            self._rounds[body["server_round"]] = (body["at"], body.get(BUCKET, 0))
        elif kind == "royalty":
            self._royalties[body["usage"]] = body["at"]

    def compare(self, tx: Connection, history: History) -> None:
        """Raise ``STATE_CORRUPT`` naming the first row that differs from the ledger."""
        _compare_keys(tx, history)
        for row in tx.execute(select(transfers)):
            move = history.moves[row.transfer]  # that there is one, and what it says, was checked before
            same = (row.nonce, row.hold_seconds) == (move.nonce, move.hold_seconds)
            if not same or not (near(row.asked_at, move.asked_at) and near(row.closed_at, move.closed_at)):
                raise corrupt(
                    f"transfers: the nonce, hold or times of {row.transfer[:24]} are not the ledger's"
                )
        for row in tx.execute(select(rounds.c.server_round, rounds.c.closed_at)):
            if row.server_round in self._rounds and not near(row.closed_at, *self._rounds[row.server_round]):
                raise corrupt(f"rounds: round {row.server_round} ended at another time than the ledger says")
        for row in tx.execute(select(royalties.c.usage, royalties.c.recorded_at)):
            if not near(row.recorded_at, self._royalties[row.usage]):
                raise corrupt(
                    f"royalties: {row.usage[:24]} was recorded at another time than the ledger says"
                )


def _compare_keys(tx: Connection, history: History) -> None:
    missing = dict(history.keys)
    for row in tx.execute(select(account_keys)):
        name = row.public_key.hex()
        told = missing.pop(name, None)
        if told is None or (row.contributor, row.status) != (told.contributor, told.status):
            raise corrupt(f"keys: {name[:16]} of {row.contributor} is {row.status}, and not so in the ledger")
        if not (near(row.valid_from, told.since) and near(row.valid_until, told.until)):
            raise corrupt(f"keys: {name[:16]} of {row.contributor} has other times than in the ledger")
    if missing:
        raise corrupt(f"keys: {next(iter(missing))[:16]} is in the ledger and not in the database")
    for row in tx.execute(select(accounts.c.contributor, accounts.c.name)):
        if row.name != history.names.get(row.contributor):
            raise corrupt(f"accounts: {row.contributor} enrolled under another name than {row.name[:40]!r}")


def near(stored: float | None, told: int | None, bucket_seconds: int = 0) -> bool:
    """Whether a row's time and its entry's, of a span of so many seconds, can be of one transaction."""
    if stored is None or told is None:
        return stored is None and told is None
    return told - SLACK_SECONDS <= stored <= told + max(1, bucket_seconds) + SLACK_SECONDS
