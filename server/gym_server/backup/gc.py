"""`gym-server gc`: delete files that nothing refers to any more, beside a running hub.

Objects that no version, ledger entry, variant, upload, message or counted update names
(``gym_server.store.usage``), parts of uploads that nobody declared, copies of remote objects, and what killed
merges, replays and backups left in ``staging/``, and records of evaluations of what is no more. Nothing younger than
the grace age is touched.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path
from typing import Any

from sqlalchemy import select

from gym_server.backup.backup import care_lock
from gym_server.backup.records import unneeded_records
from gym_server.federation import Federation
from gym_server.store.objects import StoredObject
from gym_server.store.tables import objects, readers, rounds, uploads
from gym_server.store.usage import needed

GRACE_SECONDS = 7 * 86400.0
_TEMPORARY = re.compile(r"(replay|rescore|backup)-.*|restored-[0-9a-f]{64}|.*\.(copy|fetch|partial)")
_OF_ROUND = re.compile(r"(soup|root)-(\d+)(\.gymdelta)?")
_BATCH = 200
_OVER = ("committed", "aborted")


def gc(fed: Federation, grace_seconds: float = GRACE_SECONDS, dry_run: bool = False) -> dict[str, Any]:
    """Delete what is not needed.

    Args:
        fed: The hub, running or not.
        grace_seconds: What is younger stays.
        dry_run: Delete nothing, only count.

    Returns:
        ``objects`` and ``object_bytes``, ``staging`` and ``staging_bytes``, ``records`` and ``record_bytes`` that were
        deleted (or would be), and ``kept`` and ``kept_bytes`` of the objects that stay.

    Raises:
        GymError: ``STATE_LOCKED`` while a backup or another gc runs on the folder.
    """
    before = time.time() - grace_seconds
    with care_lock(fed.folder):
        gone, gone_bytes, kept, kept_bytes = _objects(fed, before, dry_run)
        parts, part_bytes = _staging(fed, before, dry_run)
        records, record_bytes = _records(fed, before, dry_run)
    return {
        "objects": gone,
        "object_bytes": gone_bytes,
        "staging": parts,
        "staging_bytes": part_bytes,
        "records": records,
        "record_bytes": record_bytes,
        "kept": kept,
        "kept_bytes": kept_bytes,
        "dry_run": dry_run,
    }


def _objects(fed: Federation, before: float, dry_run: bool) -> tuple[int, int, int, int]:
    stored = fed.store.listed()
    stale = fed.config.rewards.stale_rounds
    with fed.database.reading() as tx:
        names = needed(tx, fed.clock.now(), stale)
        rows = {row.sha256: row.created_at for row in tx.execute(select(objects)).all()}
    old = [name for name, item in stored.items() if item.modified_at <= before]
    old += [name for name, created in rows.items() if name not in stored and created <= before]
    wanted = [name for name in old if name not in names]
    if not dry_run:
        wanted = [
            name
            for start in range(0, len(wanted), _BATCH)
            for name in _delete(fed, wanted[start : start + _BATCH], before, stored)
        ]
    gone = [name for name in wanted if name in stored]
    gone_bytes = sum(stored[name].size_bytes for name in gone)
    total = sum(item.size_bytes for item in stored.values())
    return len(gone), gone_bytes, len(stored) - len(gone), total - gone_bytes


def _delete(fed: Federation, names: list[str], before: float, stored: dict[str, StoredObject]) -> list[str]:
    """Delete objects with their rows, in one transaction, so that nothing comes to name one meanwhile."""
    with fed.database.transaction() as tx:
        still = needed(tx, fed.clock.now(), fed.config.rewards.stale_rounds)
        young = objects.c.sha256.in_(names) & (objects.c.created_at > before)
        kept = {*still, *tx.scalars(select(objects.c.sha256).where(young))}
        gone = [name for name in names if name not in kept]
        tx.execute(objects.delete().where(objects.c.sha256.in_(gone)))
        tx.execute(readers.delete().where(readers.c.sha256.in_(gone)))
        for name in gone:
            if name in stored:
                fed.store.delete(name)
    return gone


def _staging(fed: Federation, before: float, dry_run: bool) -> tuple[int, int]:
    with fed.database.reading() as tx:
        open_parts = {
            fed.store.part_path(row.contributor, row.sha256).name for row in tx.execute(select(uploads))
        }
        living = set(tx.scalars(select(rounds.c.server_round).where(rounds.c.state.not_in(_OVER))))
    gone = gone_bytes = 0
    for path in sorted(fed.store.staging.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the hub finishes uploads meanwhile
            if path.stat().st_mtime > before or not _is_left(path, open_parts, living):
                continue
            size = _size(path)
            if not dry_run:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            gone += 1
            gone_bytes += size
    return gone, gone_bytes


def _records(fed: Federation, before: float, dry_run: bool) -> tuple[int, int]:
    """Files of evaluations that neither the ledger nor a version is about."""
    with fed.database.reading() as tx:
        gone = unneeded_records(fed, tx, before)
    num_bytes = sum(path.stat().st_size for path in gone)
    if not dry_run:
        for path in gone:
            path.unlink(missing_ok=True)
    return len(gone), num_bytes


def _is_left(path: Path, open_parts: set[str], living: set[int]) -> bool:
    of_round = _OF_ROUND.fullmatch(path.name)
    if of_round is not None:
        return int(of_round[2]) not in living
    if path.name.endswith(".part"):
        return path.name not in open_parts
    return _TEMPORARY.fullmatch(path.name) is not None


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
