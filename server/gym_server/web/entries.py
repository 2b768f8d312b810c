"""Entries of the ledger as pages get them: with names, and never with a large list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.web.events import PageEvent
from gym_server.store.tables import accounts

_KINDS = {"verdict": "verdict", "version": "version"}
_MAX_TEXT = 400
_MAX_FIELDS = 40


def entry_events(tx: Connection, rows: Sequence[Any]) -> list[PageEvent]:
    """Rows of the ledger as events, each with its sequence as the id.

    ``data`` is ``{sequence, kind, name, body}``. In place of a list or an object of the body is how many parts it has,
    under ``num_`` and its name. ``name`` is what the contributor chose that the body names, or null.
    """
    bodies = [_trimmed(json.loads(row.body)) for row in rows]
    named = {body["contributor"] for body in bodies if isinstance(body.get("contributor"), str)}
    names = names_of(tx, sorted(named))
    events = []
    for row, body in zip(rows, bodies, strict=True):
        name = names.get(body.get("contributor", ""))
        data = {"sequence": row.sequence, "kind": row.kind, "name": name, "body": body}
        events.append(PageEvent(_KINDS.get(row.kind, "ledger"), data, row.sequence))
    return events


def names_of(tx: Connection, contributors: Sequence[str]) -> dict[str, str]:
    """What these contributors call themselves, by id."""
    found: dict[str, str] = {}
    columns = select(accounts.c.contributor, accounts.c.name)
    for at in range(0, len(contributors), 500):  # SQLite bounds the values of a statement
        some = columns.where(accounts.c.contributor.in_(contributors[at : at + 500]))
        found |= {row.contributor: row.name for row in tx.execute(some)}
    return found


def _trimmed(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in list(body.items())[:_MAX_FIELDS]:
        if isinstance(value, (list, dict)):
            found[f"num_{key}"] = len(value)
        else:
            found[key] = value[:_MAX_TEXT] if isinstance(value, str) else value
    return found
