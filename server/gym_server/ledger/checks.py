"""Verify a hub's database: entries, heads, the index of names, and every table that the ledger covers.

To add a table, append a ``TableCheck`` to ``CHECKS``. A row without an entry, an entry without a row, and a differing
value are all detected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, or_, select

from gym_fed.trust.ledger.audits import FAILED as AUDIT_FAILED
from gym_fed.trust.ledger.entries import SEALED, Entry, corrupt, seal, subjects
from gym_fed.trust.ledger.evaluations import SEED_KIND, commitment
from gym_fed.trust.ledger.export import LedgerCheck
from gym_fed.trust.ledger.heads import SignedHead
from gym_server.ledger.anchor import Anchor
from gym_server.ledger.columns import ColumnChecks
from gym_server.ledger.rows import entries_from, entry_of, heads_from
from gym_server.ledger.times import AT_ADMISSION, Times
from gym_server.rewards.running_scores import row_digest
from gym_server.store.database import Database
from gym_server.store.tables import (
    accounts,
    contributions,
    credits,
    evaluation_seeds,
    ledger,
    ledger_subjects,
    privacy_spending,
    reputations,
    royalties,
    running_scores,
    settlements,
    transfers,
    updates,
    variants,
    versions,
)

Recorded = Iterable[tuple[Hashable, Any]]
"""Pairs of key and value; the last value of a key applies."""


@dataclass(frozen=True)
class TableCheck:
    """The mapping between a table and the ledger entries that record its rows.

    Attributes:
        name: Plural name, for the report.
        kinds: Kinds of the entries.
        recorded: Maps an entry's kind and body to keys and values.
        rows: Query for the table's rows.
        row: Maps a row to its key and value.
    """

    name: str
    kinds: tuple[str, ...]
    recorded: Callable[[str, dict[str, Any]], Recorded]
    rows: Select[Any]
    row: Callable[[Any], tuple[Hashable, Any]]


_STATUS = {"enrolled": "active", "rebound": "active", "left": "left", "revoked": "revoked"}
_MOVES = {"transfer": "pending", "transfer-settled": "settled", "transfer-cancelled": "cancelled"}

_LOSSES = ("heldout_before", "heldout_after")

CHECKS: list[TableCheck] = [
    TableCheck(
        "accounts",
        tuple(_STATUS),
        lambda kind, body: [(body["contributor"], _STATUS[kind])],
        select(accounts.c.contributor, accounts.c.status),
        lambda row: (row.contributor, row.status),
    ),
    TableCheck(
        "keys",
        ("enrolled", "rotated", "rebound"),
        lambda kind, body: [(body["contributor"], body["public_key"])],
        select(accounts.c.contributor, accounts.c.public_key),
        lambda row: (row.contributor, row.public_key.hex()),
    ),
    TableCheck(
        "transfers",
        tuple(_MOVES),
        lambda kind, body: [(body["transfer"], (_MOVES[kind], body["from"], body["to"], body["amount"]))],
        select(transfers),
        lambda row: (row.transfer, (row.status, row.sender, row.recipient, row.amount)),
    ),
    TableCheck(
        "versions",
        ("version",),
        lambda kind, body: [
            (
                body["height"],
                (body["digest"], body["soup"], body["server_round"], *(body.get(name) for name in _LOSSES)),
            )
        ],
        select(versions),
        lambda row: (
            row.height,
            (row.digest, row.soup_sha256, row.server_round, *(getattr(row, name) for name in _LOSSES)),
        ),
    ),
    TableCheck(
        "updates",
        ("verdict",),
        lambda kind, body: (
            [(body["update"], (body["verdict"], body["contributor"]))] if body.get("update") else []
        ),
        select(updates.c.update_id, updates.c.verdict, updates.c.contributor)
        .join(ledger, ledger.c.sequence == updates.c.ledger_sequence)
        .where(or_(ledger.c.kind != SEALED, updates.c.verdict.not_in(AT_ADMISSION))),
        lambda row: (row.update_id, (row.verdict, row.contributor)),
    ),
    TableCheck(
        "sealed verdicts",
        (SEALED,),
        lambda kind, body: [(body["seal"], body["server_round"])],
        select(updates)
        .join(ledger, ledger.c.sequence == updates.c.ledger_sequence)
        .where(ledger.c.kind == SEALED),
        lambda row: (_seal(row), row.server_round),
    ),
    TableCheck(
        "credits",
        ("credit",),
        lambda kind, body: [((body["server_round"], body["contributor"]), body["amount"])],
        select(credits),
        lambda row: ((row.server_round, row.contributor), row.amount),
    ),
    TableCheck(
        "royalties",
        ("royalty",),
        lambda kind, body: [((body["usage"], who), amount) for who, amount in body["shares"].items()],
        select(royalties),
        lambda row: ((row.usage, row.contributor), row.amount),
    ),
    TableCheck(
        "privacy_costs",
        ("privacy",),
        lambda kind, body: [
            ((body["server_round"], who), (body["mechanism"], body["noise_multiplier"]))
            for who in body["contributors"]
        ],
        select(privacy_spending),
        lambda row: ((row.server_round, row.contributor), (row.mechanism, row.noise_multiplier)),
    ),
    TableCheck(
        "scores",
        ("contribution",),
        lambda kind, body: [
            (update, (score, body.get("errors", {}).get(update), body.get("similarity", {}).get(update)))
            for update, score in body["scores"].items()
        ],
        select(
            contributions.c.update_id,
            contributions.c.score,
            contributions.c.error,
            contributions.c.similarity,
        ),
        lambda row: (row.update_id, (row.score, row.error, row.similarity)),
    ),
    TableCheck(
        "scores of verdicts",
        ("verdict",),
        lambda kind, body: [(body["update"], (body["score"], body.get("error")))] if "score" in body else [],
        select(contributions.c.update_id, contributions.c.score, contributions.c.error).where(
            contributions.c.score.is_not(None)
        ),
        lambda row: (row.update_id, (row.score, row.error)),
    ),
    TableCheck(
        "running_scores",
        ("contribution",),
        lambda kind, body: [
            ((who, body["basis"], body["height"]), (one["earned"], one["digest"]))
            for who, one in body.get("running_scores", {}).items()
        ],
        select(running_scores),
        lambda row: (
            (row.contributor, row.heldout, row.height),
            (row.earned, row_digest(row.parts, row.chance)),
        ),
    ),
    TableCheck(
        "settlements",
        ("contribution",),
        lambda kind, body: [
            (who, (one["provisional"], one["owed"])) for who, one in body.get("settlements", {}).items()
        ],
        select(settlements),
        lambda row: (row.contributor, (row.provisional, row.owed)),
    ),
    TableCheck(
        "round_reputations",
        ("contribution",),
        lambda kind, body: [
            ((body["server_round"], who), value) for who, value in body["reputations"].items()
        ],
        select(contributions.c.server_round, contributions.c.contributor, contributions.c.reputation),
        lambda row: ((row.server_round, row.contributor), row.reputation),
    ),
    TableCheck(
        "reputations",
        ("contribution", AUDIT_FAILED),
        lambda kind, body: [(who, (value, body["height"])) for who, value in body["reputations"].items()],
        select(reputations),
        lambda row: (row.contributor, (row.value, row.height)),
    ),
    TableCheck(
        "evaluation_seeds",
        (SEED_KIND,),
        lambda kind, body: [(body["server_round"], body["commitment"])],
        select(evaluation_seeds),
        lambda row: (row.server_round, commitment(row.seed, row.server_round)),
    ),
    TableCheck(
        "variants",
        ("variant", "variant-removed"),
        lambda kind, body: [
            (
                (body["contributor"], body["variant"]),
                (body["revision"], body["document"], "held" if kind == "variant" else "removed"),
            )
        ],
        select(variants),
        lambda row: ((row.owner, row.slot), (row.revision, *_document(row))),
    ),
]


def verify_database(database: Database, public_key: bytes, anchor: Anchor | None = None) -> dict[str, int]:
    """Verify all data that the ledger's signatures cover.

    Returns:
        The number of compared entries, heads and rows of each table.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the first entry, head or row that differs.
    """
    recorded: dict[str, dict[Any, Any]] = {check.name: {} for check in CHECKS}
    named: set[tuple[int, str]] = set()
    times = Times()
    columns = ColumnChecks()

    def visit(entry: Entry, body: dict[str, Any]) -> None:
        named.update((entry.sequence, contributor) for contributor in subjects(entry.body_json))
        times.add(entry.kind, body)
        columns.add(entry, body)
        for check in CHECKS:
            if entry.kind in check.kinds:
                recorded[check.name].update(check.recorded(entry.kind, body))

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
            raise corrupt(f"head {heads[position].size} is for entries that are missing")
        checked = progress.done()
        if (signed := checked.head.size if checked.head else 0) != checked.entries:
            raise corrupt(f"no signed head covers entries {signed + 1} to {checked.entries}")
        if anchor is not None:
            anchor.compare(tx, signed, newest)
        _check_names(tx, named)
        counts = {check.name: _compare(tx, check, recorded[check.name]) for check in CHECKS}
        times.compare(tx, progress.history)
        columns.compare(tx, progress.history)
    late = {"late seeds of evaluations": len(checked.late_seeds)} if checked.late_seeds else {}
    return {"entries": checked.entries, "heads": checked.heads, **counts, **late}


def _check_head(progress: LedgerCheck, row: Any) -> None:
    signed = SignedHead.from_json(row.head)
    if signed.size != row.size:
        raise corrupt(f"head {row.size} says that its size is {signed.size}")
    progress.head(signed)
    if row.frontier != progress.frontier.to_text():
        raise corrupt(f"the subtrees stored with head {row.size} do not match the entries")


def _check_names(tx: Connection, named: set[tuple[int, str]]) -> None:
    stored = {(row.sequence, row.contributor) for row in tx.execute(select(ledger_subjects))}
    if named != stored:
        sequence, contributor = min(named ^ stored)
        raise corrupt(f"the index of accounts is wrong for entry {sequence} and {contributor}")


def _compare(tx: Connection, check: TableCheck, recorded: dict[Any, Any]) -> int:
    count = 0
    for row in tx.execute(check.rows):
        count += 1
        key, value = check.row(row)
        if key not in recorded:
            raise corrupt(f"{check.name}: {_readable(key)} is in the database but not in the ledger")
        if (says := recorded.pop(key)) != value:
            raise corrupt(
                f"{check.name}: {_readable(key)} is {_readable(value)}, but the ledger says {_readable(says)}"
            )
    if recorded:
        raise corrupt(
            f"{check.name}: {_readable(next(iter(recorded)))} is in the ledger but not in the database"
        )
    return count


def _readable(value: Any) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return " ".join(str(part)[:24] for part in parts)


def _seal(row: Any) -> str:
    """Return the seal of the verdict at admission; later verdicts have their own entries."""
    refused = row.verdict == "refused"
    return seal(row.manifest, "refused" if refused else "admitted", row.code, row.reason if refused else "")


def _document(row: Any) -> tuple[str, str]:
    """Return the digest of the owner's signed document, and whether its text is still stored."""
    if row.document is None:
        return row.document_sha256, "removed"
    return hashlib.sha256(row.document.encode()).hexdigest(), "held"
