"""Delete unreferenced files, in a running hub and in `gym-server gc`.

The deleted files are: objects that no version, ledger entry, variant, upload, message or counted update refers to
(``gym_server.store.usage``), stalled uploads, copies of remote objects, files left in ``staging/`` by killed merges,
replays and backups, and unreferenced evaluation records. Files younger than the grace age are kept.

Ages are measured by the hub's clock, which does not change when the machine's clock is set (``HubClock.earliest_now``).
Rows of objects are dated by the hub's clock. Files are dated by the machine's clock, so their age is measured by the
earlier of the two clocks.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import select

from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, readable_bytes
from gym_fed.delta.base import BaseSpec
from gym_server.backup.backup import care_lock
from gym_server.backup.records import unneeded_records
from gym_server.observe.instruments import GC_FREED_BYTES, GC_PASSES
from gym_server.rounds.round_store import MERGING
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore, StoredObject
from gym_server.store.tables import objects, readers, rounds, uploads
from gym_server.store.usage import needed

log = logging.getLogger("gym_server")

PASS_SECONDS = 600.0
"""Interval between two passes in a running hub."""
_PASS_OBJECTS = 2000
"""Maximum number of objects that one pass deletes."""
_TEMPORARY = re.compile(
    r"(replay|rescore|backup|groups|group-soup)-.*|restored-[0-9a-f]{64}|.*\.(copy|fetch|partial)"
)
_OF_ROUND = re.compile(r"(soup|root)-(\d+)(\.gymdelta)?")
_BATCH, _REMOTE_BATCH = 200, 1
"""Maximum number of objects deleted per transaction, in a local and in a remote store. A transaction blocks all other
writers, and a remote deletion may take seconds.
"""
_OVER = ("committed", "aborted")


class _Cutoff(NamedTuple):
    """The times after which rows (hub's clock) and files (earlier of the hub's and the machine's clock) are kept."""

    rows: float
    files: float


def gc_pass(state: HubState, config: ServerConfig) -> None:
    """Run one gc pass in a running hub: delete a limited number of objects, then log and count the deletions."""
    try:
        found = gc(state, config, max_objects=_PASS_OBJECTS)
    except GymError as error:
        if error.code is not ErrorCode.STATE_LOCKED:
            raise
        GC_PASSES.labels("skipped").inc()  # a backup or `gym-server gc` is running
        return
    GC_PASSES.labels("done").inc()
    freed = found["object_bytes"] + found["staging_bytes"] + found["record_bytes"]
    GC_FREED_BYTES.inc(freed)
    if found["objects"] or found["staging"] or found["records"]:
        log.info(
            "gc: freed %s; deleted %s, %s and %s",
            readable_bytes(freed),
            counted(found["objects"], "object"),
            counted(found["staging"], "temporary file"),
            counted(found["records"], "evaluation record"),
        )


def gc(
    state: HubState,
    config: ServerConfig,
    grace_seconds: float | None = None,
    dry_run: bool = False,
    max_objects: int | None = None,
) -> dict[str, Any]:
    """Delete unreferenced files.

    Args:
        state: The hub's state.
        config: The hub's config.
        grace_seconds: Age below which files are kept; defaults to ``storage.keep_unneeded_seconds``.
        dry_run: Count the files without deleting them.
        max_objects: Maximum number of objects to delete, oldest first; None for no limit.

    Returns:
        ``objects`` and ``object_bytes``, ``staging`` and ``staging_bytes``, ``records`` and ``record_bytes`` that were
        deleted (or would be), and ``kept`` and ``kept_bytes`` of the remaining objects.

    Raises:
        GymError: ``STATE_LOCKED`` while a backup or another gc runs on the folder.
    """
    grace = config.storage.keep_unneeded_seconds if grace_seconds is None else grace_seconds
    with care_lock(state.folder):
        now = state.clock.earliest_now()
        before = _Cutoff(now - grace, min(now, state.clock.wall()) - grace)
        stopped = _stopped_uploads(state.database, state.store, before, dry_run)
        gone, gone_bytes, kept, kept_bytes = _objects(state, config, before, dry_run, max_objects)
        parts, part_bytes = _staging(state.database, state.store, before.files, stopped, dry_run)
        records, record_bytes = _records(state.folder, state.base, state.database, before.files, dry_run)
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


def _stopped_uploads(database: Database, store: ObjectStore, before: _Cutoff, dry_run: bool) -> set[str]:
    """Withdraw uploads that received no data within the grace age; return the names of their partial files."""
    with database.reading() as tx:
        old = tx.execute(select(uploads).where(uploads.c.created_at <= before.rows)).all()
    stopped = set()
    for row in old:
        part = store.part_path(row.contributor, row.sha256)
        if part.exists() and part.stat().st_mtime > before.files:
            continue
        stopped.add(part.name)
        if not dry_run:
            with database.transaction() as tx:
                of = (uploads.c.contributor == row.contributor) & (uploads.c.sha256 == row.sha256)
                tx.execute(uploads.delete().where(of))
    return stopped


def _objects(
    state: HubState, config: ServerConfig, before: _Cutoff, dry_run: bool, max_objects: int | None
) -> tuple[int, int, int, int]:
    stored = state.store.listed()
    stale = config.rewards.stale_rounds
    with state.database.reading() as tx:
        names = needed(tx, state.clock.earliest_now(), stale)
        rows = {row.sha256: row.created_at for row in tx.execute(select(objects)).all()}
        merging = tx.execute(select(rounds.c.server_round).where(rounds.c.state == MERGING)).first()
    age = {name: created for name, created in rows.items() if created <= before.rows}
    if merging is None:  # a running merge stores soups before anything refers to them
        loose = {name: item.modified_at for name, item in stored.items() if name not in rows}
        age |= {name: modified for name, modified in loose.items() if modified <= before.files}
    wanted = sorted((name for name in age if name not in names), key=age.__getitem__)[:max_objects]
    if not dry_run:
        batch = _REMOTE_BATCH if state.store.is_remote else _BATCH
        wanted = [
            name
            for start in range(0, len(wanted), batch)
            for name in _delete(state, config, wanted[start : start + batch], before.rows, stored)
        ]
    gone = [name for name in wanted if name in stored]
    gone_bytes = sum(stored[name].size_bytes for name in gone)
    total = sum(item.size_bytes for item in stored.values())
    return len(gone), gone_bytes, len(stored) - len(gone), total - gone_bytes


def _delete(
    state: HubState, config: ServerConfig, names: list[str], before: float, stored: dict[str, StoredObject]
) -> list[str]:
    """Delete objects and their rows in one transaction, so that no new reference to them can appear in between."""
    now = state.clock.earliest_now()
    with state.database.transaction() as tx:
        still = needed(tx, now, config.rewards.stale_rounds)
        young = objects.c.sha256.in_(names) & (objects.c.created_at > before)
        kept = {*still, *tx.scalars(select(objects.c.sha256).where(young))}
        gone = [name for name in names if name not in kept]
        tx.execute(objects.delete().where(objects.c.sha256.in_(gone)))
        tx.execute(readers.delete().where(readers.c.sha256.in_(gone)))
        for name in gone:
            if name in stored:
                state.store.delete(name)
    return gone


def _staging(
    database: Database, store: ObjectStore, before: float, stopped: set[str], dry_run: bool
) -> tuple[int, int]:
    with database.reading() as tx:
        open_parts = {
            store.part_path(row.contributor, row.sha256).name for row in tx.execute(select(uploads))
        } - stopped
        living = set(tx.scalars(select(rounds.c.server_round).where(rounds.c.state.not_in(_OVER))))
    gone = gone_bytes = 0
    for path in [*sorted(store.staging.iterdir()), *store.partial_copies()]:
        with contextlib.suppress(FileNotFoundError):  # the hub may have finished the upload in the meantime
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


def _records(
    folder: Path, base: BaseSpec, database: Database, before: float, dry_run: bool
) -> tuple[int, int]:
    """Delete evaluation records that belong to no ledger entry and no version; return their number and bytes."""
    with database.reading() as tx:
        gone = unneeded_records(folder, base, tx, before)
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
