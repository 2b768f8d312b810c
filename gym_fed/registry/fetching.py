"""Fetch a version into a folder, atomically; a killed pull resumes where it stopped.

Files are written to a hidden folder next to the requested one, which is renamed at the end. Every byte is hashed before
anything is loaded as a model.
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
"""The file in a pulled folder that holds the signed manifest from the store."""
MADE = ".gym-made.json"
"""The file in a pulled folder with the SHA-256 of each file created locally, such as rebuilt weights."""


@dataclass(frozen=True)
class Pulled:
    """The result of a pull.

    Attributes:
        fetched: False if all files were already here.
        base: The folder or name of the base that it was rebuilt from, or that its adapter needs; None if there is
            none, or if it is not on this machine.
        kept: Share of the delta in the rebuilt weights; 1 for an adapter or an unmerged delta; None for weights, and
            for a model that was rebuilt by an earlier pull.
    """

    version: ModelVersion
    folder: Path
    fetched: bool
    base: str | None
    kept: float | None = None


@dataclass(frozen=True)
class Damage:
    """A file of a version that differs from its signed digest."""

    path: str
    problem: str


def fetch(
    objects: Objects, version: ModelVersion, record: bytes, folder: Path, finish: Callable[[Path], None]
) -> bool:
    """Fetch a version's files into ``folder``.

    Args:
        record: The bytes of its signed manifest.
        folder: The target. It must not exist, or must hold an earlier pull of this version.
        finish: Called with the hidden folder when it has all files and before it is renamed, to rebuild a model.

    Returns:
        Whether anything was fetched.

    Raises:
        GymError: ``FILE_EXISTS`` for a folder with something else; ``DISK_FULL``; as ``Objects.fetch`` and ``finish``.
    """
    if os.path.lexists(folder):
        _require_same(version, record, folder)
        return False
    make_folder(folder.absolute().parent)
    part = folder.with_name(f".{folder.name}.{version.sha256[:16]}.pull")
    with _locked(part):
        if os.path.lexists(folder):  # a concurrent pull has just ended
            _require_same(version, record, folder)
            return False
        missing = [file for file in version.manifest.files if not _is_there(part, file)]
        if sum(file.num_bytes for file in missing) > shutil.disk_usage(part).free:
            raise disk_full(part)
        for file in missing:
            objects.fetch(file.sha256, file.num_bytes, part / file.path)
            failpoint("registry-file-fetched")
        finish(part)
        write_atomically(part / RECORD, record)
        write_atomically(
            part / MADE, json.dumps(_rebuilt_digests(version, part), indent=1, sort_keys=True).encode()
        )
        failpoint("registry-pull-complete")
        part.rename(folder)
        fsync_folder(folder.absolute().parent)
    return True


def _is_there(part: Path, file: ModelFile) -> bool:
    """Return True if an earlier attempt fetched this file completely; otherwise remove its content."""
    target = part / file.path
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not target.is_file() or file_sha256(target) != file.sha256:
        target.unlink()
        return False
    return True


def _require_same(version: ModelVersion, record: bytes, folder: Path) -> None:
    """Check that a folder is a complete pull of this version."""
    stored_record = folder / RECORD
    if not stored_record.is_file() or stored_record.read_bytes() != record:
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{folder} exists, but is not a pull of {version.reference}",
            "choose another folder with -o",
        )
    expected = {file.path: file.sha256 for file in version.manifest.files}
    if (folder / MADE).is_file():
        expected |= {str(path): str(sha256) for path, sha256 in read_object(folder / MADE).items()}
    for path, sha256 in expected.items():
        target = folder / path
        if not target.is_file() or file_sha256(target) != sha256:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"{target}: differs from {version.reference}",
                f"remove {folder}, and pull it again",
            )


def _rebuilt_digests(version: ModelVersion, part: Path) -> dict[str, str]:
    """Return the SHA-256 of files in the folder that are not in the manifest."""
    listed = {file.path for file in version.manifest.files} | {RECORD, MADE}
    here = {file.relative_to(part).as_posix(): file for file in part.rglob("*") if file.is_file()}
    return {path: file_sha256(file) for path, file in sorted(here.items()) if path not in listed}


@contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Lock the hidden folder against other pulls; the lock ends with the process in any case."""
    while True:
        part.mkdir(exist_ok=True)
        with lockable_folder(part) as descriptor:
            lock(descriptor, wait=True)
            if not is_still_there(descriptor, part):
                continue  # the previous pull has renamed it
            yield
            return
