"""`gym-server check`: whether a hub's folder, or a backup, is whole."""

from __future__ import annotations

from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import file_sha256
from gym_server.backup.backup import states_of
from gym_server.backup.place import Place, object_name
from gym_server.federation import Federation
from gym_server.store.usage import essential


def check_hub(fed: Federation) -> dict[str, Any]:
    """Verify the ledger with all tables, and that every object and state file that is needed is there and right.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the first thing that is not.
    """
    found = fed.ledger.verify()
    with fed.database.reading() as tx:
        names = essential(tx)
        states = states_of(tx, fed)
    for sha256, what in sorted(names.items()):
        try:
            path = fed.store.local_path(sha256)
        except GymError as error:
            raise _missing(sha256, what, "is missing") from error
        if file_sha256(path) != sha256:
            raise _missing(sha256, what, "does not hash to its name")
    return {"server": fed.server, **found, "objects": len(names), "state_files": len(states)}


def check_backup(url: str, snapshot: str | None = None) -> dict[str, Any]:
    """Read every file of the snapshots of a place and compare it with its sha256.

    Raises:
        GymError: ``NOT_FOUND`` without a snapshot; ``STATE_CORRUPT`` naming the first file that is not what it was.
    """
    place = Place(url)
    manifests = place.manifests()
    wanted = {name: m for name, m in manifests.items() if snapshot in (None, name)}
    if not wanted:
        raise GymError(
            ErrorCode.NOT_FOUND, f"no snapshot {snapshot or ''} in {url}", "gym-server backup makes one"
        )
    objects = set[str]()
    for name, manifest in wanted.items():
        for path, file in manifest.files.items():
            place.check(f"snapshots/{name}/{path}", file.sha256)
        objects |= set(manifest.objects)
    for sha256 in sorted(objects):
        place.check(object_name(sha256), sha256)
    return {"snapshots": list(wanted), "objects": len(objects)}


def _missing(sha256: str, what: str, problem: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"object {sha256}, {what}, {problem}",
        "gym-server restore brings it back from a backup",
    )
