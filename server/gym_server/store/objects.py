"""Content-addressed objects: bytes named by their sha256, staged on local disk, kept behind fsspec.

An upload grows as ``uploads/<owner>-<sha256>.part``; what is acknowledged has been fsynced. A finished object is
verified, renamed into place and only then known to the database, so a crash leaves a resumable part or a whole object.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import fsync_folder

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class StoredObject:
    """What the store says of an object: its size, and when it was written (Unix seconds)."""

    size_bytes: int
    modified_at: float


class ObjectStore:
    """A folder or an fsspec URL with one file per object.

    Args:
        url: Where objects live; a plain path is a local folder.
        staging: Local folder for parts, and for copies of remote objects that are being mapped.
    """

    def __init__(self, url: str, staging: Path) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self.staging = staging
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._is_local:  # single updates are nobody's but the hub's
            Path(self._root).mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            self._fs.makedirs(self._root, exist_ok=True)

    def has(self, sha256: str) -> bool:
        return bool(self._fs.exists(self._path(sha256)))

    def local_path(self, sha256: str) -> Path:
        """A local file with the object's bytes, to be mapped; a remote object is copied once.

        Raises:
            GymError: ``NOT_FOUND`` when the store does not hold it.
        """
        if not self.has(sha256):
            raise GymError(ErrorCode.NOT_FOUND, f"no object {sha256}")
        if self._is_local:
            return Path(self._path(sha256))
        copy = self.staging / f"{sha256}.copy"
        if not copy.exists():
            part = self.staging / f"{sha256}.fetch"
            self._fs.get_file(self._path(sha256), str(part))
            os.replace(part, copy)
        return copy

    def listed(self) -> dict[str, StoredObject]:
        """Every object that is there, by its sha256."""
        found = {}
        for path, told in self._fs.find(self._root, detail=True).items():
            name = path.rpartition("/")[2]
            if len(name) == 64:
                found[name] = StoredObject(int(told["size"]), _modified(told))
        return found

    def delete(self, sha256: str) -> None:
        """Delete an object, and the local copy of a remote one."""
        self._fs.rm_file(self._path(sha256))
        (self.staging / f"{sha256}.copy").unlink(missing_ok=True)

    def part_path(self, owner: str, sha256: str) -> Path:
        """Where an unfinished upload of ``owner`` grows. Parts are never shared between owners."""
        return self.staging / f"{owner}-{sha256}.part"

    def adopt(self, part: Path, sha256: str) -> int:
        """Verify a finished file and move it into the store; returns its size in bytes.

        Raises:
            GymError: ``HASH_MISMATCH``; the file is removed, since no continuation can mend it.
        """
        found = file_sha256(part)
        if found != sha256:
            part.unlink()
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"the uploaded bytes hash to {found}, not to {sha256}",
                "upload it again",
            )
        size = part.stat().st_size
        if self.has(sha256):
            part.unlink()
            return size
        target = self._path(sha256)
        self._fs.makedirs(self._fs._parent(target), exist_ok=True)
        if self._is_local:
            os.replace(part, target)
            fsync_folder(Path(target).parent)
        else:
            self._fs.put_file(str(part), target)
            part.unlink()
        return size

    def put_bytes(self, data: bytes) -> str:
        """Store small bytes; returns their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        if not self.has(sha256):
            part = self.part_path("hub", sha256)
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self.adopt(part, sha256)
        return sha256

    def put_file(self, path: Path) -> str:
        """Store a copy of a local file; returns its sha256."""
        sha256 = file_sha256(path)
        if not self.has(sha256):
            part = self.part_path("hub", sha256)
            shutil.copyfile(path, part)
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
            self.adopt(part, sha256)
        return sha256

    def _path(self, sha256: str) -> str:
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise GymError(ErrorCode.USAGE, f"{sha256[:80]!r} is not a sha256 in hex")
        return f"{self._root}/{sha256[:2]}/{sha256}"


def _modified(told: dict[str, Any]) -> float:
    """When a file was written, by what fsspec's implementations call it; now where none says so."""
    for key in ("mtime", "LastModified", "last_modified", "created"):
        value = told.get(key)
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return time.time()


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
