"""Checks after a run: no acknowledged update is lost, credits are conserved, and the ledger is valid."""

from __future__ import annotations

from typing import Any

from gym_server.store.database import Database
from gym_server.store.tables import credits, ledger, rounds, transfers, updates
from sqlalchemy import func, select

from _crowd.hub import CrowdHub


def lost_receipts(hub: CrowdHub, url: str, receipts: dict[str, dict[str, Any]]) -> list[str]:
    """Return the acknowledged updates that the stopped hub's database lacks or has with another ledger entry."""
    database = Database.open(url, hub.folder, read_only=url.startswith("sqlite"))
    try:
        with database.reading() as tx:
            stored = set(tx.scalars(select(updates.c.update_id)))
            entries = dict(tx.execute(select(ledger.c.sequence, ledger.c.hash)).tuples().all())
    finally:
        database.close()
    return [
        digest
        for digest, receipt in receipts.items()
        if digest not in stored or entries.get(receipt["ledger_sequence"]) != receipt["ledger_hash"]
    ]


def committed_rounds(hub: CrowdHub, url: str) -> list[int]:
    """Return the numbers of the committed rounds."""
    database = Database.open(url, hub.folder, read_only=url.startswith("sqlite"))
    try:
        with database.reading() as tx:
            query = select(rounds.c.server_round).where(rounds.c.state == "committed")
            return list(tx.scalars(query.order_by(rounds.c.server_round)))
    finally:
        database.close()


def check_credits(hub: CrowdHub, url: str, pool: int) -> tuple[int, int]:
    """Return the paid credits, and the maximum that the committed rounds could pay.

    Raises:
        RuntimeError: If a round pays more than its pool, or balances do not add up to the credits.
    """
    database = Database.open(url, hub.folder, read_only=url.startswith("sqlite"))
    try:
        with database.reading() as tx:
            paid = dict(
                tx.execute(
                    select(credits.c.server_round, func.sum(credits.c.amount)).group_by(
                        credits.c.server_round
                    )
                )
                .tuples()
                .all()
            )
            committed = set(tx.scalars(select(rounds.c.server_round).where(rounds.c.state == "committed")))
            moved = int(tx.scalar(select(func.count()).select_from(transfers)) or 0)
    finally:
        database.close()
    wrong = {number: amount for number, amount in paid.items() if number not in committed or amount > pool}
    if wrong or moved:
        raise RuntimeError(f"rounds paid {wrong} of a pool of {pool}; {moved} transfers that nobody made")
    return sum(map(int, paid.values())), pool * len(committed)
