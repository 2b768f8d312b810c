"""The verification of a hub's own database: entries, heads, the index of names, and the tables of ``checks``."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from gym_fed.ledger.entries import Entry, corrupt, subjects
from gym_fed.ledger.export import LedgerCheck
from gym_fed.ledger.heads import SignedHead
from gym_server.ledger.anchor import Anchor
from gym_server.ledger.checks import CHECKS, TableCheck
from gym_server.ledger.columns import ColumnChecks
from gym_server.ledger.rows import entries_from, entry_of, heads_from
from gym_server.ledger.times import Times
from gym_server.store.database import Database
from gym_server.store.tables import ledger_subjects


def verify_database(database: Database, public_key: bytes, anchor: Anchor | None = None) -> dict[str, int]:
    """Check everything that the ledger's signature stands for.

    Returns:
        How many entries, heads and rows of each table were compared.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the first entry, head or row that does not fit.
    """
    told: dict[str, dict[Any, Any]] = {check.name: {} for check in CHECKS}
    named: set[tuple[int, str]] = set()
    times = Times()
    columns = ColumnChecks()

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        named.update((entry.sequence, contributor) for contributor in subjects(entry.body_json))
        times.add(entry.kind, body)
        columns.add(entry, body)
        for check in CHECKS:
            if entry.kind in check.kinds:
                told[check.name].update(check.told(entry.kind, body))

    newest = anchor.read() if anchor is not None else None
    with database.reading() as tx:
        progress = LedgerCheck(public_key, visit)
        heads = tx.execute(heads_from(0)).all()
        position = 0
        for row in tx.execute(entries_from(-(2**31))):
            progress.entry(entry_of(row))
            while position < len(heads) and heads[position].size <= row.sequence:
                _check_head(progress, heads[position])
                position += 1
        if position < len(heads):
            raise corrupt(f"head {heads[position].size} is of entries that are not there")
        checked = progress.done()
        if (signed := checked.head.size if checked.head else 0) != checked.entries:
            raise corrupt(f"entries {signed + 1} to {checked.entries} are under no signed head")
        if anchor is not None:
            anchor.compare(tx, signed, newest)
        _check_names(tx, named)
        counts = {check.name: _compare(tx, check, told[check.name]) for check in CHECKS}
        times.compare(tx, progress.history)
        columns.compare(tx, progress.history)
    return {"entries": checked.entries, "heads": checked.heads, **counts}


def _check_head(progress: LedgerCheck, row: Any) -> None:
    signed = SignedHead.from_json(row.head)
    if signed.size != row.size:
        raise corrupt(f"head {row.size} says that it is of size {signed.size}")
    progress.head(signed)
    if row.frontier != progress.frontier.to_text():
        raise corrupt(f"the subtrees that are stored with head {row.size} are not those of the entries")


def _check_names(tx: Connection, named: set[tuple[int, str]]) -> None:
    stored = {(row.sequence, row.contributor) for row in tx.execute(select(ledger_subjects))}
    if named != stored:
        sequence, contributor = min(named ^ stored)
        raise corrupt(f"the index of names is wrong on entry {sequence} and {contributor}")


def _compare(tx: Connection, check: TableCheck, told: dict[Any, Any]) -> int:
    count = 0
    for row in tx.execute(check.rows):
        count += 1
        key, value = check.row(row)
        if key not in told:
            raise corrupt(f"{check.name}: {_readable(key)} is in the database and not in the ledger")
        if (says := told.pop(key)) != value:
            raise corrupt(
                f"{check.name}: {_readable(key)} is {_readable(value)}, the ledger says {_readable(says)}"
            )
    if told:
        raise corrupt(f"{check.name}: {_readable(next(iter(told)))} is in the ledger and not in the database")
    return count


def _readable(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join(str(part)[:24] for part in parts)
