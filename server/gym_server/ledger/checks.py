"""What of the database must agree with the ledger: a line a table.

To add one: append a ``TableCheck`` to ``CHECKS``. A row that no entry tells of, an entry without its row, and a value
that differs are all found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, or_, select

from gym_fed.ledger.entries import SEALED, seal
from gym_server.ledger.times import AT_THE_DOOR
from gym_server.store.tables import (
    accounts,
    contributions,
    credits,
    ledger,
    privacy_spending,
    reputations,
    royalties,
    transfers,
    updates,
    variants,
    versions,
)

Told = Iterable[tuple[Hashable, Any]]
"""Keys and values; of two with one key the later one holds."""


@dataclass(frozen=True)
class TableCheck:
    """How a table and the ledger tell of the same things.

    Attributes:
        name: Plural, for the report.
        kinds: Of the entries that tell of them.
        told: An entry's kind and body, to keys and values.
        rows: The table's rows.
        row: A row, to its key and value.
    """

    name: str
    kinds: tuple[str, ...]
    told: Callable[[str, dict[str, Any]], Told]
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
        .where(or_(ledger.c.kind != SEALED, updates.c.verdict.not_in(AT_THE_DOOR))),
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
            (update, (score, body.get("similarity", {}).get(update)))
            for update, score in body["scores"].items()
        ],
        select(contributions.c.update_id, contributions.c.score, contributions.c.similarity),
        lambda row: (row.update_id, (row.score, row.similarity)),
    ),
    TableCheck(
        "standings",
        ("contribution",),
        lambda kind, body: [
            ((body["server_round"], who), value) for who, value in body["reputations"].items()
        ],
        select(contributions.c.server_round, contributions.c.contributor, contributions.c.reputation),
        lambda row: ((row.server_round, row.contributor), row.reputation),
    ),
    TableCheck(
        "reputations",
        ("contribution",),
        lambda kind, body: [(who, (value, body["height"])) for who, value in body["reputations"].items()],
        select(reputations),
        lambda row: (row.contributor, (row.value, row.height)),
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


def _seal(row: Any) -> str:
    """Of the verdict at the door; what came later has an entry of its own."""
    refused = row.verdict == "refused"
    return seal(row.manifest, "refused" if refused else "admitted", row.code, row.reason if refused else "")


def _document(row: Any) -> tuple[str, str]:
    """The digest of what a variant's owner signed, from the text while it is there, and whether it is."""
    if row.document is None:
        return row.document_sha256, "removed"
    return hashlib.sha256(row.document.encode()).hexdigest(), "held"
