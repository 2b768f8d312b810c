"""Times of ledger entries, and checks of the times of keys, transfers, rounds and royalties against them.

An entry has a time in whole seconds. In private rounds it has a span that reveals little about the time of each
contributor's update: a verdict at admission has the hours from the round's opening to its deadline, and later entries
of the round, including its end, have the hour in which they were written. Keys and transfers always have times in
seconds, since hold periods depend on them. The time of a database row is taken in the same transaction as that of its
entry, so the two differ only slightly.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from gym_fed.trust.identity.history import History
from gym_fed.trust.ledger.entries import SEALED, corrupt
from gym_server.store.tables import account_keys, accounts, rounds, royalties, transfers

SLACK_SECONDS = 60.0
BUCKET_SECONDS = 3600
BUCKET = "at_bucket_seconds"
"""Key in the body of an entry whose time is the beginning of a span; its value is the length of the span in seconds."""

AT_ADMISSION = ("admitted", "refused")
"""Verdicts that an update gets at admission, before its round is merged."""
_OF_ROUNDS = frozenset(
    {
        SEALED,
        "verdict",
        "version",
        "aborted",
        "credit",
        "contribution",
        "privacy",
        "refused-summary",
        "evaluated",
        "safety-probed",
    }
)


def stamp(tx: Connection, kind: str, body: dict[str, Any], now: float, private: bool) -> dict[str, int]:
    """Return the fields that record the time of an entry.

    Args:
        tx: The transaction that writes it.
        kind: The entry's kind.
        body: Its body so far.
        now: Current time, Unix seconds.
        private: True if the hub's rounds are private.

    Returns:
        ``at``, and ``at_bucket_seconds`` if ``at`` is the beginning of a span.
    """
    if not private or kind not in _OF_ROUNDS:
        return {"at": int(now)}
    if kind == SEALED or body.get("verdict") in AT_ADMISSION:
        of_round = rounds.c.server_round == body.get("server_round")
        row = tx.execute(select(rounds.c.opened_at, rounds.c.deadline).where(of_round)).first()
        if row is not None and row.deadline is not None and row.opened_at <= now <= row.deadline:
            return _span(row.opened_at, row.deadline)
    return _span(now, now)


def _span(first: float, last: float) -> dict[str, int]:
    """Return the span of whole hours that contains two times."""
    begin, end = (int(seconds) // BUCKET_SECONDS * BUCKET_SECONDS for seconds in (first, last))
    return {"at": begin, BUCKET: end + BUCKET_SECONDS - begin}


class Times:
    """Collects from all entries when rounds ended and royalties were recorded, then compares the rows with them."""

    def __init__(self) -> None:
        self._rounds: dict[int, tuple[int, int]] = {}
        self._royalties: dict[str, int] = {}

    def add(self, kind: str, body: dict[str, Any]) -> None:
        """Add the next entry."""
        if kind in ("version", "aborted"):
            self._rounds[body["server_round"]] = (body["at"], body.get(BUCKET, 0))
        elif kind == "royalty":
            self._royalties[body["usage"]] = body["at"]

    def compare(self, tx: Connection, history: History) -> None:
        """Raise ``STATE_CORRUPT`` naming the first row that differs from the ledger."""
        _compare_keys(tx, history)
        for row in tx.execute(select(transfers)):
            move = history.moves[row.transfer]  # its existence and content were checked before
            same = (row.nonce, row.hold_seconds) == (move.nonce, move.hold_seconds)
            if not same or not (near(row.asked_at, move.asked_at) and near(row.closed_at, move.closed_at)):
                raise corrupt(
                    f"transfers: the nonce, hold or times of {row.transfer[:24]} differ from the ledger"
                )
        for row in tx.execute(select(rounds.c.server_round, rounds.c.closed_at)):
            if row.server_round in self._rounds and not near(row.closed_at, *self._rounds[row.server_round]):
                raise corrupt(
                    f"rounds: round {row.server_round} ended at a different time than the ledger says"
                )
        for row in tx.execute(select(royalties.c.usage, royalties.c.recorded_at)):
            if not near(row.recorded_at, self._royalties[row.usage]):
                raise corrupt(
                    f"royalties: {row.usage[:24]} was recorded at a different time than the ledger says"
                )


def _compare_keys(tx: Connection, history: History) -> None:
    missing = dict(history.keys)
    for row in tx.execute(select(account_keys)):
        name = row.public_key.hex()
        recorded = missing.pop(name, None)
        if recorded is None or (row.contributor, row.status) != (recorded.contributor, recorded.status):
            raise corrupt(f"keys: {name[:16]} of {row.contributor} is {row.status}, but not in the ledger")
        if not (near(row.valid_from, recorded.since) and near(row.valid_until, recorded.until)):
            raise corrupt(f"keys: {name[:16]} of {row.contributor} has times that differ from the ledger")
    if missing:
        raise corrupt(f"keys: {next(iter(missing))[:16]} is in the ledger but not in the database")
    for row in tx.execute(select(accounts.c.contributor, accounts.c.name)):
        if row.name != history.names.get(row.contributor):
            raise corrupt(
                f"accounts: {row.contributor} enrolled under a different name than {row.name[:40]!r}"
            )


def near(stored: float | None, recorded: int | None, bucket_seconds: int = 0) -> bool:
    """Return True if a row's time and its entry's span of seconds can be from one transaction."""
    if stored is None or recorded is None:
        return stored is None and recorded is None
    return recorded - SLACK_SECONDS <= stored <= recorded + max(1, bucket_seconds) + SLACK_SECONDS
