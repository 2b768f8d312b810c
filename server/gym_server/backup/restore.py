"""Create a hub's folder from a backup atomically (`gym-server restore`), and sign a restore statement.

The files are restored into a working folder next to the new one, checked, signed, and then renamed into place. A killed
restore leaves only the working folder, which the next restore deletes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_fed.config.hub.server import CONFIG_NAME, ServerConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.config.yaml.strict import parse_config, read_config_text
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import fsync_folder, is_safe_path, write_atomically
from gym_fed.core.text import plain
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.identity.passphrase import PassphraseSource
from gym_fed.trust.ledger.heads import SignedHead
from gym_fed.trust.ledger.restored import SignedRestored
from gym_server.backup.place import DATABASE, Place, SnapshotManifest, object_name
from gym_server.backup.rows import load_rows
from gym_server.federation import (
    PASSPHRASE_VARIABLE,
    Federation,
    folder_lock,
    objects_url,
)
from gym_server.ledger.chain import Ledger
from gym_server.ledger.rows import hash_of
from gym_server.store.database import Database
from gym_server.store.failures import parse_url, shown
from gym_server.store.objects import ObjectStore

NEWEST_HEAD = "newest-head.json"
_SQLITE = "sqlite:///"


def restore(
    url: str,
    folder: Path,
    *,
    snapshot: str | None = None,
    known: SignedHead | None = None,
    fork: bool = False,
    reason: str = "restored from a backup",
    database_url: str | None = None,
    objects: str | None = None,
) -> dict[str, Any]:
    """Create a hub's folder from a snapshot.

    Args:
        url: Location of the backups.
        folder: A new or empty folder.
        snapshot: Name of the snapshot; None takes the newest.
        known: Newest signed head that the coordinator has, from any contributor.
        fork: True to continue although all entries after the snapshot are permanently lost.
        reason: Reason, shown to contributors.
        database_url: URL of an empty PostgreSQL database to use instead of the config's.
        objects: Location of the objects to use instead of the config's ``storage.objects``.

    Returns:
        ``snapshot``, ``server``, ``entries`` (number of valid ones), ``lost`` (number known to be lost), ``objects``.

    Raises:
        GymError: ``NOT_FOUND`` if there is no such snapshot; ``FILE_EXISTS`` for a folder that is not empty;
            ``STATE_CORRUPT`` if the result differs from the backup; ``STALE`` if a newer state is known;
            ``CONFIG_INVALID`` if the config in the backup names a location outside ``folder`` that the caller has not
            given.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{folder} is not empty",
            "restore into a new folder; if this folder was already copied back, omit --from",
        )
    place = Place(url)
    name, manifest = _chosen(place, snapshot)
    lost = _newer_head(place, manifest, known)
    if lost is not None and not fork:
        raise GymError(
            ErrorCode.STALE,
            f"snapshot {name} ends at entry {manifest.size}, but the hub has since signed entry {lost.size}",
            "use a newer snapshot, or --fork to continue without the lost entries if contributors accept that",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{folder.name}.restoring")
    with _alone(work):
        fresh = work / "hub"
        _bring(place, name, manifest, fresh, {"database": database_url, "objects": objects})
        failpoint("restore-brought")
        signed = _sign(fresh, manifest, lost, reason)
        failpoint("restore-signed")
        fsync_folder(fresh)
        if folder.exists():
            folder.rmdir()
        os.replace(fresh, folder)
        fsync_folder(folder.parent)
    failpoint("restore-renamed")
    return {
        "snapshot": name,
        "dir": str(folder),
        "server": manifest.server,
        "entries": signed.statement.restored_at_entry,
        "lost": None if lost is None else lost.size - manifest.size,
        "objects": len(manifest.objects),
    }


def fork_in_place(
    folder: Path, reason: str, at_entry: int | None = None, known: SignedHead | None = None
) -> SignedRestored:
    """Sign the restore statement for a folder that was copied back without ``restore``.

    Args:
        folder: The hub's folder; the hub must not be running.
        reason: Reason, shown to contributors.
        at_entry: Number of the last valid entry, if the hub has added entries since; None for the newest.
        known: A head that contributors have and the hub's ledger does not include.

    Raises:
        GymError: ``STATE_LOCKED`` while the hub runs; errors from ``Ledger.restored``.
    """
    with folder_lock(folder), Federation.open(folder) as fed:
        return fed.ledger.restored(reason, at_entry, known)


def read_head(path: Path) -> SignedHead:
    """Read a head from a file: ``keys/newest-head.json``, or the output of `gym-client ledger head --json`.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` if it is not JSON; ``STATE_CORRUPT`` if it is not a head.
    """
    try:
        return SignedHead.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no head at {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GymError(ErrorCode.DATA_INVALID, f"{path} is not JSON: {error}") from error


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Yield an empty working folder for exclusive use, and delete it afterwards."""
    work.mkdir(mode=0o700, exist_ok=True)
    with folder_lock(work):
        try:
            for path in work.iterdir():
                if path.name != "hub.lock":
                    shutil.rmtree(path)
            yield
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _chosen(place: Place, snapshot: str | None) -> tuple[str, SnapshotManifest]:
    found = place.manifests()
    if not found or (snapshot is not None and snapshot not in found):
        what = f"no snapshot {snapshot!r}" if snapshot else "no snapshot"
        there = f"there are {', '.join(found)}" if found else "gym-server backup creates one"
        raise GymError(ErrorCode.NOT_FOUND, f"{what} in {place.url}", there)
    if len({manifest.server for manifest in found.values()}) > 1 and snapshot is None:
        raise GymError(
            ErrorCode.USAGE,
            f"{place.url} has backups of several hubs",
            f"choose one with --snapshot: {', '.join(found)}",
        )
    name = snapshot or list(found)[-1]
    return name, found[name]


def _newer_head(place: Place, manifest: SnapshotManifest, known: SignedHead | None) -> SignedHead | None:
    """Return the highest head beyond the snapshot, from other snapshots or ``known``; None if there is none."""
    heads = [other.signed_head for other in place.manifests().values() if other.server == manifest.server]
    if known is not None and known.head.server != manifest.server:
        raise GymError(
            ErrorCode.USAGE,
            f"the given head is from {known.head.server}, but the backup is from {manifest.server}",
        )
    newer = [head for head in (*heads, known) if head is not None and head.size > manifest.size]
    return max(newer, key=lambda head: head.size, default=None)


def _bring(
    place: Place, name: str, manifest: SnapshotManifest, fresh: Path, given: dict[str, str | None]
) -> None:
    fresh.mkdir(mode=0o700)
    for path, file in manifest.files.items():
        if path != DATABASE:
            place.get(f"snapshots/{name}/{path}", fresh / path, file.sha256)
    _give(fresh, {key: value for key, value in given.items() if value is not None})
    config = load_config(fresh / CONFIG_NAME, ServerConfig)
    _require_inside(config, {key for key, value in given.items() if value is not None})
    archive = fresh.with_name("archive") / DATABASE  # SQLite adds files next to the database
    place.get(f"snapshots/{name}/{DATABASE}", archive, manifest.files[DATABASE].sha256)
    load_rows(archive, config.storage.database, fresh)
    staging = fresh / "staging"
    store = ObjectStore(objects_url(fresh, config), staging)
    for sha256 in sorted(manifest.objects):
        if not store.has(sha256):
            part = staging / f"restored-{sha256}"
            place.get(object_name(sha256), part, sha256)
            store.adopt(part, sha256)
        failpoint("restore-object")
    for path, file in sorted(manifest.records.items()):
        place.get(object_name(file.sha256), fresh / path, file.sha256)


def _sign(fresh: Path, manifest: SnapshotManifest, lost: SignedHead | None, reason: str) -> SignedRestored:
    """Verify the restored ledger, and append the statement to it."""
    config = load_config(fresh / CONFIG_NAME, ServerConfig)
    key = SigningKey.load(fresh / "keys" / "ledger.pem", PassphraseSource(PASSPHRASE_VARIABLE).get)
    if server_id(key.public_key) != manifest.server:
        raise GymError(ErrorCode.STATE_CORRUPT, f"the backup's key is not the key of {manifest.server}")
    anchor = fresh / "keys" / NEWEST_HEAD
    anchor.unlink(missing_ok=True)  # copied after the database, so it may be ahead
    database = Database.open(config.storage.database, fresh)
    try:
        found = Ledger(database, key, anchor)
        found.verify()
        head = manifest.signed_head
        if head is not None:
            with database.reading() as tx:
                stored = hash_of(tx, head.size)
            if stored != head.head.hash:
                raise GymError(
                    ErrorCode.STATE_CORRUPT,
                    f"the backup's database lacks entry {head.size} of its manifest",
                )
        return found.restored(reason, None, lost)
    finally:
        database.close()


def _give(fresh: Path, storage: dict[str, str]) -> None:
    """Write the caller's locations into the restored config, which the hub uses from then on."""
    if not storage:
        return
    import yaml

    path = fresh / CONFIG_NAME
    document, _ = parse_config(path, read_config_text(path))
    if not isinstance(document.get("storage") or {}, dict):
        return  # load_config reports the error
    document["storage"] = {**(document.get("storage") or {}), **storage}
    write_atomically(path, yaml.safe_dump(document, sort_keys=False).encode(), mode=0o600)


def _require_inside(config: ServerConfig, given: set[str]) -> None:
    """Refuse a config that would make the restore write outside the new folder or connect to another host.

    Anybody who can write to the backup may have changed the config.

    Args:
        config: The restored config.
        given: Keys of ``storage`` that the caller has set.
    """
    database, objects = config.storage.database, config.storage.objects
    name = database.removeprefix(_SQLITE)
    is_file = name != database and is_safe_path(name) and "?" not in name  # not an SQLite URI
    if not is_file and (database.startswith("sqlite") or "database" not in given):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"storage.database of the backup, {plain(shown(parse_url(database)), 200)!r}, is not inside the hub's "
            "folder; restore writes only there, or to a database that you specify",
            "pass --database sqlite:///hub.db, or an empty one: --database postgresql+psycopg://USER@HOST/DATABASE",
        )
    if "objects" not in given and not is_safe_path(objects):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"storage.objects of the backup, {plain(objects, 200)!r}, is not inside the hub's folder; restore "
            "writes only there, or to a location that you specify",
            "pass --objects objects, or --objects with that location if it is yours",
        )
