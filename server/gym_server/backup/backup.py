"""Back up a running or stopped hub (`gym-server backup`), and verify a hub or a backup (`gym-server check`).

The database is copied first, as one consistent state, and the ledger of the copy is verified. The files that it names
are immutable and copied afterwards. The manifest is written last, so that an interrupted backup does not count.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Connection, select

import gym_fed
from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import file_sha256, is_safe_path
from gym_fed.trust.identity.keys import encrypted_pem, is_encrypted
from gym_fed.trust.ledger.heads import SignedHead
from gym_server.backup.place import DATABASE, MANIFEST, File, Place, SnapshotManifest, object_name
from gym_server.backup.records import missing_records, whole_records
from gym_server.backup.rows import copy_rows
from gym_server.ledger.checks import verify_database
from gym_server.ledger.rows import hash_of, newest_head
from gym_server.rounds.soups import optimizer_name, residual_name
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.hub_lock import locked_file
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import versions
from gym_server.store.usage import essential, needed

SESSION_KEY = "session.key"
LAST_BACKUP = "last_backup"
"""Key of the setting that stores the time of the last finished backup (Unix seconds)."""
_PRIVATE = b"PRIVATE KEY-----"


@dataclass(frozen=True)
class KeyPolicy:
    """How a backup handles unencrypted private keys.

    Attributes:
        include_plain: Copy them unencrypted.
        passphrase: Function that returns the passphrase for encrypting the copies; if None, unencrypted keys are
            refused.
    """

    include_plain: bool = False
    passphrase: Callable[[], bytes] | None = None


def backup(
    state: HubState, config: ServerConfig, url: str, policy: KeyPolicy, keep: int | None = None
) -> dict[str, Any]:
    """Add a snapshot to a backup; objects that are already in the backup are not copied again.

    Args:
        state: The hub's state.
        config: The hub's config.
        url: A folder, or an fsspec URL.
        policy: See ``KeyPolicy``.
        keep: Number of this hub's snapshots to keep. Older ones, and objects that only they use, are deleted. None
            keeps all snapshots.

    Returns:
        ``snapshot``, ``to``, ``entries``, ``files``, ``objects``, ``records``, ``new_objects``, ``new_bytes``,
        ``dropped`` and ``unfinished``.

    Raises:
        GymError: ``PERMISSION_DENIED`` for unencrypted keys that the policy refuses; ``STATE_CORRUPT`` if the ledger,
            an object or a state file is damaged; ``STATE_LOCKED`` while another backup or gc runs on the folder.
    """
    keys = _keys(state.folder, policy)
    place = Place(url)
    with (
        care_lock(state.folder),
        tempfile.TemporaryDirectory(dir=state.folder / "staging", prefix="backup-") as work,
    ):
        unfinished = place.drop_unfinished()
        before = state.ledger.newest_head()
        copy = Path(work) / "database"
        head, names, states = _copy_database(state, config, copy, before)
        failpoint("backup-database")
        _require_same_ledger(state.database, head)
        created = int(time.time())
        when = datetime.fromtimestamp(created, UTC).strftime("%Y%m%dT%H%M%SZ")
        snapshot = f"{when}-{head.size if head else 0:08d}"
        if snapshot in place.manifests():
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{url} already has a snapshot {snapshot} from this second",
                "try again",
            )
        there = place.objects()
        objects, new = dict[str, int](), 0
        data = _data_files(config, state.folder)
        for sha256, what in sorted(names.items()):
            size = _copy_object(state.database, state.store, place, sha256, what, there)
            if size is not None:
                objects[sha256] = size
                new += sha256 not in there
            failpoint("backup-object")
        records = {}
        for path, sha256 in whole_records(state.folder):
            if _copy_record(place, path, sha256, there):
                records[path.relative_to(state.folder).as_posix()] = File(
                    sha256=sha256, size_bytes=path.stat().st_size
                )
        files = {}
        sources = {
            DATABASE: copy,
            CONFIG_NAME: state.folder / CONFIG_NAME,
            **states,
            **data,
        }
        for name, content in keys.items():
            sources[f"keys/{name}"] = Path(work) / f"key-{name}"
            sources[f"keys/{name}"].write_bytes(content)
        for name, path in sources.items():
            sha256, size = place.put(path, f"snapshots/{snapshot}/{name}")
            files[name] = File(sha256=sha256, size_bytes=size)
        failpoint("backup-files")
        manifest = SnapshotManifest(
            server=state.server,
            created_at=created,
            software_version=gym_fed.__version__,
            head=None if head is None else head.to_dict(),
            files=files,
            objects=objects,
            records=records,
        )
        written = Path(work) / MANIFEST
        written.write_text(manifest.model_dump_json(indent=2))
        failpoint("backup-manifest")
        place.put(written, f"snapshots/{snapshot}/{MANIFEST}")
        state.database.set(LAST_BACKUP, str(created))
        dropped = _drop_old(place, state.server, keep) if keep is not None else []
    return {
        "snapshot": snapshot,
        "to": url,
        "entries": manifest.size,
        "files": len(files),
        "objects": len(objects),
        "records": len(records),
        "new_objects": new,
        "new_bytes": sum(objects[name] for name in objects if name not in there),
        "dropped": dropped,
        "unfinished": unfinished,
    }


def care_lock(folder: Path) -> IO[str]:
    """Lock a folder against a second backup or gc until the file is closed; a running hub does not take this lock.

    Raises:
        GymError: ``STATE_LOCKED``.
    """
    what = f"another backup or gc is running on {folder}"
    return locked_file(folder / "care.lock", GymError(ErrorCode.STATE_LOCKED, what, "wait until it ends"))


def _copy_database(
    state: HubState, config: ServerConfig, copy: Path, before: SignedHead | None
) -> tuple[SignedHead | None, dict[str, str], dict[str, Path]]:
    """Copy the database to an SQLite file, verify the copy, and collect the other files of the snapshot."""
    if state.database.sqlite_path is None:
        database = Database.open(f"sqlite:///{copy}", copy.parent)
        copy_rows(state.database, database)
    else:
        source = sqlite3.connect(f"file:{state.database.sqlite_path}?mode=ro", uri=True)
        target = sqlite3.connect(copy)
        with contextlib.closing(source), contextlib.closing(target):
            source.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")  # writes a single file, without a log
        database = Database(f"sqlite:///{copy}")
    try:
        verify_database(database, state.ledger.public_key)
        with database.reading() as tx:
            head = newest_head(tx)
            if before is not None and (head is None or head.size < before.size):
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"the copy of the database lacks entry {before.size}, which was signed earlier",
                )
            found = (
                head,
                needed(tx, state.clock.now(), config.rewards.stale_rounds),
                states_of(tx, state.folder),
            )
    finally:
        database.close()
    with contextlib.closing(sqlite3.connect(copy)) as file:
        file.execute("PRAGMA journal_mode=DELETE")
    return found


def states_of(tx: Connection, folder: Path) -> dict[str, Path]:
    """Return the state files that versions left for the next round, by name."""
    found = {}
    for server_round, residual in tx.execute(select(versions.c.server_round, versions.c.residual)).all():
        names = {residual_name(server_round), optimizer_name(server_round), *([residual] if residual else [])}
        for name in sorted(names):
            path = folder / "residuals" / name
            if path.exists():
                found[f"residuals/{name}"] = path
            elif name == residual:
                raise GymError(ErrorCode.STATE_CORRUPT, f"{path}, which a version needs, is missing")
    return found


def _require_same_ledger(database: Database, head: SignedHead | None) -> None:
    if head is None:
        return
    with database.reading() as tx:
        found = hash_of(tx, head.size)
    if found != head.head.hash:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"entry {head.size} has changed since the database was copied",
            "the database was replaced in the meantime",
        )


def _copy_object(
    database: Database, store: ObjectStore, place: Place, sha256: str, what: str, there: dict[str, int]
) -> int | None:
    """Copy an object unless the backup has it. Return its size, or None if the hub does not have it yet."""
    try:
        path = store.local_path(sha256)
    except GymError as error:
        with database.reading() as tx:
            if error.code is not ErrorCode.NOT_FOUND or sha256 in essential(tx):
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"object {sha256}, {what}, is missing: {error.message}",
                    "restore the hub from an older backup",
                ) from error
        return None  # an unfinished upload, or an update whose file was never sent
    size = path.stat().st_size
    if there.get(sha256) == size:
        return size
    found, size = place.put(path, object_name(sha256))
    if found != sha256:
        place.drop_objects({sha256})
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"object {sha256}, {what}, does not match its sha256",
            "restore the hub from an older backup",
        )
    return size


def _copy_record(place: Place, path: Path, sha256: str, there: dict[str, int]) -> bool:
    """Copy a file of a record unless the backup has it; False if the hub is replacing the file."""
    if sha256 in there:
        return True
    try:
        found, _ = place.put(path, object_name(sha256))
    except FileNotFoundError:
        return False
    if found != sha256:
        place.drop_objects({sha256})
    return found == sha256


def _data_files(config: ServerConfig, folder: Path) -> dict[str, Path]:
    """Return the data files inside the hub's folder that the config names.

    Raises:
        GymError: ``CONFIG_INVALID`` for a name that is not valid on every system.
    """
    gate, root = config.gate, config.root
    named = [gate.heldout, root.data if root else None, gate.safety.prompts if gate.safety else None]
    found = {}
    for text in named:
        if text is None or "task:" in text or Path(text).is_absolute():
            continue
        path = (folder / text).resolve()
        if path.is_file() and path.is_relative_to(folder):
            name = path.relative_to(folder).as_posix()
            if not is_safe_path(name):
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"{path} has a name that cannot be restored on every system",
                    "rename the file, and change the config",
                )
            found[name] = path
    return found


def _keys(folder: Path, policy: KeyPolicy) -> dict[str, bytes]:
    """Return the contents of ``keys/`` for the backup, by file name.

    Raises:
        GymError: ``PERMISSION_DENIED`` for a private key that would be stored unencrypted.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    found = {}
    secret: bytes | None = None
    for path in sorted((folder / "keys").iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        content = path.read_bytes()
        is_private = _PRIVATE in content and not is_encrypted(content)
        is_secret = path.name == SESSION_KEY and not is_encrypted(content)
        if is_secret and not policy.include_plain:
            continue  # a restored hub creates a new one, and its contributors log in again
        if is_private and not policy.include_plain:
            if policy.passphrase is None:
                raise GymError(
                    ErrorCode.PERMISSION_DENIED,
                    f"{path} is not encrypted, and anyone with the backup could act as the hub",
                    "add --encrypt-keys (GYM_BACKUP_PASSPHRASE), or --include-plain-keys",
                )
            secret = secret or policy.passphrase()
            content = encrypted_pem(load_pem_private_key(content, None), secret)
        found[path.name] = content
    return found


def _drop_old(place: Place, server: str, keep: int) -> list[str]:
    own = [name for name, manifest in place.manifests().items() if manifest.server == server]
    old = own[: max(0, len(own) - keep)]
    for name in old:
        place.drop(name)
    named = {sha256 for manifest in place.manifests().values() for sha256 in manifest.stored}
    place.drop_objects(set(place.objects()) - named)
    return old


def check_hub(state: HubState) -> dict[str, Any]:
    """Verify the ledger, all tables, the content of every essential object, and the presence of every state file.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the first problem.
    """
    found = state.ledger.verify()
    with state.database.reading() as tx:
        names = essential(tx)
        states = states_of(tx, state.folder)
        lost = missing_records(state.folder, tx)
    for sha256, what in sorted(names.items()):
        try:
            path = state.store.local_path(sha256)
        except GymError as error:
            raise _missing(sha256, what, "is missing") from error
        if file_sha256(path) != sha256:
            raise _missing(sha256, what, "does not match its sha256")
    return {
        "server": state.server,
        **found,
        "objects": len(names),
        "state_files": len(states),
        "lost_records": lost,
    }


def check_backup(url: str, snapshot: str | None = None) -> dict[str, Any]:
    """Read every file of a backup's snapshots and compare it with its sha256.

    Raises:
        GymError: ``NOT_FOUND`` if there is no snapshot; ``STATE_CORRUPT`` naming the first damaged file.
    """
    place = Place(url)
    manifests = place.manifests()
    selected = {name: m for name, m in manifests.items() if snapshot in (None, name)}
    if not selected:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"no snapshot {snapshot} in {url}" if snapshot else f"no snapshot in {url}",
            "gym-server backup creates one",
        )
    objects = set[str]()
    for name, manifest in selected.items():
        for path, file in manifest.files.items():
            place.check(f"snapshots/{name}/{path}", file.sha256)
        objects |= manifest.stored
    for sha256 in sorted(objects):
        place.check(object_name(sha256), sha256)
    return {"snapshots": list(selected), "objects": len(objects)}


def _missing(sha256: str, what: str, problem: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"object {sha256}, {what}, {problem}",
        "gym-server restore restores it from a backup",
    )
