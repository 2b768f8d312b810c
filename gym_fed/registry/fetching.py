"""Fetches a version into a folder: whole or not at all; a pull that was killed goes on where it stopped.

The files come into a hidden folder beside the one that was asked for, which takes its name at the end. Every byte is
hashed; nothing is read as a model before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.file_lock import is_still_there, lock, lockable_folder
from gym_fed.core.files import disk_full, file_sha256, fsync_folder, make_folder, write_atomically
from gym_fed.core.json_files import read_object
from gym_fed.data.objects import Objects
from gym_fed.registry.manifest import ModelFile, ModelVersion

RECORD = ".gym-model.json"
"""In a pulled folder: the signed manifest as it was on the store."""
MADE = ".gym-made.json"
"""In a pulled folder: sha256 of each file that was made here, such as the weights of a delta's model."""


@dataclass(frozen=True)
class Pulled:
    """What a pull came to.

    Attributes:
        found: The version.
        folder: Where it is.
        fetched: Whether anything was; False for one that was here.
        base: Folder or name of the base that it was rebuilt from, or that goes with an adapter; None without one, and
            for one that is not on this machine.
    """

    found: ModelVersion
    folder: Path
    fetched: bool
    base: str | None


@dataclass(frozen=True)
class Damage:
    """A file of a version that is not what was signed."""

    path: str
    problem: str


def fetch(
    objects: Objects, found: ModelVersion, record: bytes, folder: Path, finish: Callable[[Path], None]
) -> bool:
    """Have a version's files in ``folder``.

    Args:
        objects: The store.
        found: What to fetch.
        record: The bytes of its signed manifest.
        folder: Must not exist, or be what an earlier pull of this version left.
        finish: Is given the hidden folder with all files, before it takes its name: rebuilds a model.

    Returns:
        Whether anything was fetched.

    Raises:
        GymError: ``FILE_EXISTS`` for a folder with something else; ``DISK_FULL``; as ``Objects.fetch`` and ``finish``.
    """
    if os.path.lexists(folder):
        _require_same(found, record, folder)
        return False
    make_folder(folder.absolute().parent)
    part = folder.with_name(f".{folder.name}.{found.sha256[:16]}.pull")
    with _alone(part):
        if os.path.lexists(folder):  # another pull has just ended
            _require_same(found, record, folder)
            return False
        missing = [file for file in found.manifest.files if not _is_there(part, file)]
        _require_room(part, sum(file.num_bytes for file in missing))
        for file in missing:
            objects.fetch(file.sha256, file.num_bytes, part / file.path)
            failpoint("registry-file-fetched")
        finish(part)
        write_atomically(part / RECORD, record)
        write_atomically(part / MADE, json.dumps(_made(found, part), indent=1, sort_keys=True).encode())
        failpoint("registry-pull-complete")
        part.rename(folder)
        fsync_folder(folder.absolute().parent)
    return True


def _is_there(part: Path, file: ModelFile) -> bool:
    """Return whether an earlier try has fetched this file wholly; another content is removed."""
    target = part / file.path
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not target.is_file() or file_sha256(target) != file.sha256:
        target.unlink()
        return False
    return True


def _require_same(found: ModelVersion, record: bytes, folder: Path) -> None:
    """Return whether a folder is a whole pull of this version."""
    kept = folder / RECORD
    if not kept.is_file() or kept.read_bytes() != record:
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{folder}: exists, and is no pull of {found.reference}",
            "choose another folder with -o",
        )
    wanted = {file.path: file.sha256 for file in found.manifest.files}
    if (folder / MADE).is_file():
        wanted |= {str(path): str(sha256) for path, sha256 in read_object(folder / MADE).items()}
    for path, sha256 in wanted.items():
        target = folder / path
        if not target.is_file() or file_sha256(target) != sha256:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"{target}: is not what {found.reference} has",
                f"remove {folder}, and pull it again",
            )


def _made(found: ModelVersion, part: Path) -> dict[str, str]:
    """What is in the folder and not in the manifest, by sha256."""
    listed = {file.path for file in found.manifest.files} | {RECORD, MADE}
    here = {file.relative_to(part).as_posix(): file for file in part.rglob("*") if file.is_file()}
    return {path: file_sha256(file) for path, file in sorted(here.items()) if path not in listed}


def _require_room(part: Path, num_bytes: int) -> None:
    if num_bytes > shutil.disk_usage(part).free:
        raise disk_full(part)


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Hold the hidden folder against other pulls; the lock ends with the process, however that ends."""
    while True:
        part.mkdir(exist_ok=True)
        with lockable_folder(part) as descriptor:
            lock(descriptor, wait=True)
            if not is_still_there(descriptor, part):
                continue  # the one before has given it its name
            yield
            return
