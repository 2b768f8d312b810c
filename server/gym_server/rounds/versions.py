"""Global versions, each of which is the base plus soups. The next round starts from the current version.

Version 0 is the base. The parent of a version is the version before it, unless the coordinator rolled back to an
earlier one. The versions in between are then abandoned, but remain readable. Only the ledger records which version is
current.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from gym_fed.config.hub.task import SoupReference
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.lineage import ROLLED_BACK, VERSION
from gym_server.ledger.rows import newest_entry
from gym_server.store.tables import ledger, versions


@dataclass(frozen=True)
class Version:
    """A global version: height 0 is the base model itself."""

    height: int
    digest: str
    residual: str | None = None
    server_round: int = 0
    """Number of the round that created the version; 0 for the base."""
    parent: int = 0
    """Height of the parent version."""


def newest_height(tx: Connection) -> int:
    """Return the height of the most recent version; 0 before the first."""
    return int(tx.scalar(select(func.max(versions.c.height))) or 0)


def head_of(tx: Connection, base_digest: str) -> Version:
    """Return the current version: the newest one, or the one that the coordinator has rolled back to."""
    height, rollback = newest_height(tx), newest_entry(tx, ROLLED_BACK)
    if rollback is not None:
        body = json.loads(rollback.body)
        if body["newest_height"] == height:
            height = body["to_height"]
    return version_at(tx, height, base_digest)


def version_at(tx: Connection, height: int, base_digest: str) -> Version:
    """Return a version by its height.

    Raises:
        GymError: ``NOT_FOUND`` if there is none.
    """
    if height == 0:
        return Version(0, base_digest)
    newest = newest_height(tx)  # checked before the query, since SQLite rejects numbers beyond 64 bits
    fits = 0 < height <= newest
    row = tx.execute(select(versions).where(versions.c.height == height)).first() if fits else None
    if row is None:
        raise GymError(ErrorCode.NOT_FOUND, f"there is no version {height}", f"versions 0 to {newest} exist")
    return _version(row)


def _version(row: Any) -> Version:
    return Version(row.height, row.digest, row.residual, row.server_round, row.parent)


def heights_to(tx: Connection, height: int) -> set[int]:
    """Return the heights of a version and its ancestors, without the base."""
    columns = select(versions.c.height, versions.c.parent).where(versions.c.height <= height)
    parents = {int(row.height): int(row.parent) for row in tx.execute(columns)}
    found = set()
    while height in parents:
        found.add(height)
        height = parents[height]
    return found


def newest_to(tx: Connection, height: int, most: int) -> list[int]:
    """Return the newest ``most`` heights among a version and its ancestors, highest first."""
    found: list[int] = []
    parents: dict[int, int] = {}
    while height and len(found) < most:
        if height not in parents:  # in blocks, since heights are consecutive except after a rollback
            block = (versions.c.height <= height) & (versions.c.height > height - most)
            parents.update(
                tx.execute(select(versions.c.height, versions.c.parent).where(block)).tuples().all()
            )
        found.append(height)
        height = parents.get(height, 0)
    return found


def versions_to(tx: Connection, height: int, most: int) -> list[Version]:
    """Return the newest ``most`` of a version and its ancestors, newest first, without the base."""
    heights = newest_to(tx, height, most)
    rows = tx.execute(
        select(versions).where(versions.c.height.in_(heights)).order_by(versions.c.height.desc())
    )
    return [_version(row) for row in rows]


def base_loss(tx: Connection) -> float | None:
    """Return the held-out loss of version 0, as measured for the first version based on it; None if unknown."""
    first = select(versions.c.heldout_before).where(
        versions.c.parent == 0, versions.c.heldout_before.is_not(None)
    )
    found = tx.scalar(first.order_by(versions.c.height).limit(1))
    return None if found is None else float(found)


class VersionDepths:
    """A cache of version depths. A version's parent never changes, so each row is read once per process."""

    def __init__(self) -> None:
        self._known = {0: 0}

    def of(self, tx: Connection, height: int) -> int:
        """Return the number of versions from the base to this one, including it; 0 for the base."""
        if height not in self._known:
            newer = versions.c.height > max(self._known)
            rows = tx.execute(
                select(versions.c.height, versions.c.parent).where(newer).order_by(versions.c.height)
            )
            for row in rows.all():
                self._known[int(row.height)] = self._known[int(row.parent)] + 1
        return self._known[height]


Sums = Mapping[int, Mapping[str, Any]]
"""``digest``, ``sum`` and ``sum_bytes`` of the integer sum of a version, by height, for versions that have one."""


class VersionSums:
    """A cache of the integer sums in the ledger. Entries never change, so each is read once per process."""

    def __init__(self) -> None:
        self._known: dict[int, Mapping[str, Any]] = {}
        self._sequence = 0

    def read(self, tx: Connection) -> Sums:
        """Return the sums of all versions, reading the entries that were added since the last call."""
        newer = (ledger.c.kind == VERSION) & (ledger.c.sequence > self._sequence)
        columns = select(ledger.c.sequence, ledger.c.body).where(newer).order_by(ledger.c.sequence)
        for row in tx.execute(columns).all():
            body = json.loads(row.body)
            if "integers" in body:
                self._known[body["height"]] = body["integers"]
            self._sequence = max(self._sequence, int(row.sequence))
        return self._known


def soups_to(tx: Connection, height: int, sums: Sums) -> list[SoupReference]:
    """Return the soups from the base to a version, in order."""
    heights = heights_to(tx, height)
    rows = tx.execute(select(versions).where(versions.c.height <= height).order_by(versions.c.height))
    return [
        _reference(row, sums.get(row.height), row.height == height) for row in rows if row.height in heights
    ]


def _reference(row: Any, integers: Mapping[str, Any] | None, is_last: bool) -> SoupReference:
    held = integers or {}
    return SoupReference(
        sha256=row.soup_sha256,
        size_bytes=row.soup_bytes,
        version_digest=row.digest,
        server_round=row.server_round,
        integers=held.get("digest"),
        sum_sha256=held.get("sum") if is_last else None,
        sum_bytes=held.get("sum_bytes") if is_last else None,
    )
