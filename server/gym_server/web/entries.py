"""Ledger entries in the form sent to pages, with names and without large lists."""

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
    """Convert ledger rows to events whose ids are the sequence numbers.

    ``data`` is ``{sequence, kind, name, body}``. A list or object in the body is replaced by its number of items, under
    ``num_`` and its key. ``name`` is the name of the contributor in the body, or null.
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
    """Return the names that contributors have chosen, by id."""
    found: dict[str, str] = {}
    columns = select(accounts.c.contributor, accounts.c.name)
    for at in range(0, len(contributors), 500):  # SQLite limits the number of values in a statement
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
