"""The ledger's tables, read: entries and heads in their order."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from gym_fed.ledger.entries import Entry
from gym_fed.ledger.heads import SignedHead
from gym_server.store.tables import ledger, ledger_heads


def entries_from(sequence: int) -> Any:
    """Rows of entries from a sequence number on."""
    return select(ledger).where(ledger.c.sequence >= sequence).order_by(ledger.c.sequence)


def heads_from(size: int) -> Any:
    """Rows of heads from a size on."""
    return select(ledger_heads).where(ledger_heads.c.size >= size).order_by(ledger_heads.c.size)


def hash_of(tx: Connection, sequence: int) -> str | None:
    """The hash of an entry; None where there is none."""
    return tx.scalar(select(ledger.c.hash).where(ledger.c.sequence == sequence))


def newest_head(tx: Connection) -> SignedHead | None:
    """The newest head that was signed."""
    text = tx.scalar(select(ledger_heads.c.head).order_by(ledger_heads.c.size.desc()).limit(1))
    return SignedHead.from_json(text) if text else None


def newest_entry(tx: Connection, *kinds: str) -> Any:
    """The last row that is of one of these kinds; None where there is none."""
    newest = (
        select(ledger).where(ledger.c.kind == kind).order_by(ledger.c.sequence.desc()).limit(1)
        for kind in kinds
    )
    rows = [row for query in newest if (row := tx.execute(query).first()) is not None]
    return max(rows, key=lambda row: row.sequence, default=None)


def entry_of(row: Any) -> Entry:
    """A row as an entry."""
    return Entry(row.sequence, row.kind, row.body, row.previous_hash, row.hash)
