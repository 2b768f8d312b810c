"""Queries on the ledger's tables of entries and heads."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select

from gym_fed.trust.ledger.entries import Entry, parsed
from gym_fed.trust.ledger.heads import HEADS_BEFORE, SignedHead
from gym_server.store.tables import ledger, ledger_heads


def entries_from(sequence: int) -> Any:
    """Select rows of entries from a sequence number on."""
    return select(ledger).where(ledger.c.sequence >= sequence).order_by(ledger.c.sequence)


def heads_from(size: int) -> Any:
    """Select rows of heads from a size on."""
    return select(ledger_heads).where(ledger_heads.c.size >= size).order_by(ledger_heads.c.size)


def hash_of(tx: Connection, sequence: int) -> str | None:
    """Return the hash of an entry; None if it does not exist."""
    return tx.scalar(select(ledger.c.hash).where(ledger.c.sequence == sequence))


def newest_head(tx: Connection) -> SignedHead | None:
    """Return the newest signed head."""
    text = tx.scalar(select(ledger_heads.c.head).order_by(ledger_heads.c.size.desc()).limit(1))
    return SignedHead.from_json(text) if text else None


def signed_heads(tx: Connection) -> int:
    """Return the number of signed heads, as recorded in the entry under the newest head.

    Counting rows would not reveal a deleted head. Rows are counted only if the entry has no count, as in a ledger of an
    older version.
    """
    newest = tx.scalar(select(func.max(ledger_heads.c.size)))
    text = tx.scalar(select(ledger.c.body).where(ledger.c.sequence == newest)) if newest is not None else None
    body = parsed(text) if text is not None else None
    if isinstance(body, dict) and isinstance(before := body.get(HEADS_BEFORE), int):
        return before + 1
    return int(tx.scalar(select(func.count()).select_from(ledger_heads)) or 0)


def newest_entry(tx: Connection, *kinds: str) -> Any:
    """Return the last row of one of these kinds; None if there is none."""
    newest = (
        select(ledger).where(ledger.c.kind == kind).order_by(ledger.c.sequence.desc()).limit(1)
        for kind in kinds
    )
    rows = [row for query in newest if (row := tx.execute(query).first()) is not None]
    return max(rows, key=lambda row: row.sequence, default=None)


def entry_of(row: Any) -> Entry:
    """Convert a row to an entry."""
    return Entry(row.sequence, row.kind, row.body, row.previous_hash, row.hash)
