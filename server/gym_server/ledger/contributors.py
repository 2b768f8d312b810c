"""Contributors of a version: their shares, and the names of those who agreed to be named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.text import plain
from gym_fed.delta.base import BaseSpec
from gym_fed.registry.card.facts import FILE
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_server.ledger.royalties import attribute_use
from gym_server.rounds.round_store import PAID_VERDICTS
from gym_server.store.database import Database
from gym_server.store.tables import accounts, updates

_PARTS = 1_000_000
_MAX_NAME = 120


def published_names(tx: Connection, contributors: Iterable[str]) -> dict[str, str]:
    """Return the names, by id, of those whose newest credited update was signed with ``publish_name``."""
    found = {}
    for who in contributors:
        mine = (updates.c.contributor == who) & updates.c.verdict.in_(PAID_VERDICTS)
        newest = select(updates.c.manifest).where(mine).order_by(updates.c.server_round.desc()).limit(1)
        manifest = tx.scalar(newest)
        if manifest is not None and UpdateManifest.parse(manifest).publish_name:
            name = tx.scalar(select(accounts.c.name).where(accounts.c.contributor == who))
            if name:
                found[who] = plain(name, _MAX_NAME)
    return found


def contributors_of(base: BaseSpec, database: Database, height: int) -> list[dict[str, Any]]:
    """Return the contributors of a version, largest share first; empty if nobody was credited.

    Returns:
        For each, ``contributor``, ``share`` (shares add up to 1), and ``name`` if the contributor agreed to be named.
    """
    try:
        shares = attribute_use(base, database, {str(height): 1}, _PARTS, "improvement").shares
    except GymError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        return []
    with database.reading() as tx:
        names = published_names(tx, shares)
    return [
        {"contributor": who, **({"name": names[who]} if who in names else {}), "share": part / _PARTS}
        for who, part in sorted(shares.items(), key=lambda one: (-one[1], one[0]))
        if part
    ]


def write_contributors(base: BaseSpec, database: Database, folder: Path, height: int) -> list[dict[str, Any]]:
    """Write the contributors of a version into its model folder, if anybody was credited."""
    found = contributors_of(base, database, height)
    if found:
        document = {"version": height, "contributors": found}
        write_atomically(folder / FILE, json.dumps(document, indent=2, ensure_ascii=False).encode())
    return found
