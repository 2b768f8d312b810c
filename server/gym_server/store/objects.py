"""Content-addressed objects: files named by their sha256, staged on local disk and stored with fsspec.

An upload is written to ``uploads/<owner>-<sha256>.part``; acknowledged bytes have been fsynced. A finished object is
verified and renamed before the database records it. A crash therefore leaves a resumable part or a complete object.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, fsync_folder, make_folder, move_file
from gym_fed.core.hashed_file import BLOCK_BYTES, HashedFile
from gym_server.store.remote import RemoteObjects


@dataclass(frozen=True)
class StoredObject:
    """The size of a stored object, and its modification time in Unix seconds."""

    size_bytes: int
    modified_at: float


class ObjectStore:
    """An object store with one file per object: a local folder, S3, or another fsspec URL.

    Args:
        url: Location of the objects; a plain path is a local folder.
        staging: Local folder for parts, and for copies of remote objects that are being mapped.
        max_copy_bytes: Limit on the total size of these copies, in bytes.
        read_only: Do not create folders.
    """

    def __init__(
        self, url: str, staging: Path, max_copy_bytes: int = 8 << 30, read_only: bool = False
    ) -> None:
        self.staging = staging.resolve()
        if not read_only:
            make_folder(staging, 0o700)
        self._remote: RemoteObjects | None = None
        self._fs: Any = LocalFileSystem()
        if url.startswith("file://") or "://" not in url:
            self._root = str(Path(url.removeprefix("file://")).resolve())
            if not read_only:
                make_folder(Path(self._root), 0o700)  # only the hub may read it
        else:
            self._remote = RemoteObjects(url, self.staging, max_copy_bytes)
            self._fs, self._root = self._remote.fs, self._remote.root

    @property
    def is_remote(self) -> bool:
        """True if objects are on another machine."""
        return self._remote is not None

    @property
    def place(self) -> str:
        """Return the location of the objects, for messages."""
        return self._root

    def has(self, sha256: str) -> bool:
        """Return True if the store has an object.

        Raises:
            StoreUnavailable: If a remote store does not answer.
        """
        path = self._path(sha256)
        return Path(path).exists() if self._remote is None else self._remote.has(path)

    def local_path(self, sha256: str) -> Path:
        """Return the path of a local file for memory-mapping; a remote object is copied once.

        Raises:
            GymError: ``NOT_FOUND`` if the store does not have it.
            StoreUnavailable: If a remote store does not answer, or returns other bytes.
        """
        path = self._path(sha256)
        try:
            if self._remote is not None:
                return self._remote.copy(path, sha256)
        except FileNotFoundError:
            raise GymError(ErrorCode.NOT_FOUND, f"no object {sha256}") from None
        if not Path(path).exists():
            raise GymError(ErrorCode.NOT_FOUND, f"no object {sha256}")
        return Path(path)

    def listed(self) -> dict[str, StoredObject]:
        """Return every stored object by its sha256."""
        with nullcontext() if self._remote is None else self._remote.mapped_errors():
            paths = self._fs.find(self._root, detail=True)
            return {
                path.rpartition("/")[2]: StoredObject(int(details["size"]), self._modified(path, details))
                for path, details in paths.items()
                if len(path.rpartition("/")[2]) == 64
            }

    @property
    def folders(self) -> list[Path]:
        """Return the folders in which an upload needs free space, which may be on two disks."""
        return [self.staging, Path(self._root)] if self._remote is None else [self.staging]

    def partial_copies(self) -> list[Path]:
        """Return incomplete copies, which remain if the hub is killed while moving an object from another disk."""
        return [] if self._remote is not None else sorted(Path(self._root).glob("*/.*.partial"))

    def delete(self, sha256: str) -> None:
        """Delete an object, and the local copy of a remote one."""
        (self._fs.rm_file if self._remote is None else self._remote.delete)(self._path(sha256))
        (self.staging / f"{sha256}.copy").unlink(missing_ok=True)

    def size(self, sha256: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            GymError: ``NOT_FOUND`` if the store does not have it.
        """
        if not self.has(sha256):
            raise GymError(ErrorCode.NOT_FOUND, f"no object {sha256}")
        return int(self._fs.size(self._path(sha256)))

    def part_path(self, owner: str, sha256: str) -> Path:
        """Return the path of an unfinished upload of ``owner``; owners never share parts."""
        return self.staging / f"{owner}-{sha256}.part"

    def adopt(self, part: Path, sha256: str) -> int:
        """Verify a finished file and move it into the store; return its size in bytes.

        Raises:
            GymError: ``HASH_MISMATCH``; the file is then deleted, since resuming the upload cannot fix it.
            StoreUnavailable: If a remote store does not accept it; the file is kept.
        """
        found = file_sha256(part)
        if found != sha256:
            part.unlink()
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"the uploaded bytes hash to {found}, not to {sha256}",
                "upload it again",
            )
        return self._place(part, sha256)

    def put_bytes(self, data: bytes) -> str:
        """Store bytes; return their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        if not self.has(sha256):
            part = self._own_part(sha256)
            try:
                with open(part, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                self.adopt(part, sha256)
            finally:
                part.unlink(missing_ok=True)
        return sha256

    def put_file(self, path: Path) -> str:
        """Store a copy of a local file; return its sha256."""
        part = self._own_part("copy")
        try:
            with open(path, "rb") as source, open(part, "xb+") as target, HashedFile(target) as copy:
                while block := source.read(BLOCK_BYTES):
                    copy.write(block)
                sha256 = copy.finish()
            self._place(part, sha256)
        finally:
            part.unlink(missing_ok=True)
        return sha256

    def _place(self, part: Path, sha256: str) -> int:
        """Move a file whose bytes have this sha256 into the store; return its size in bytes."""
        size = part.stat().st_size
        if self.has(sha256):
            part.unlink()
            return size
        target = self._path(sha256)
        if self._remote is None:
            make_folder(Path(target).parent)
            move_file(part, Path(target))  # staging may be on another disk
            fsync_folder(Path(target).parent)
        else:
            self._remote.put(part, target, sha256)
        return size

    def _own_part(self, what: str) -> Path:
        """Return a unique path for an object that the hub writes itself; two threads may store the same object."""
        return self.part_path(f"hub-{secrets.token_hex(8)}", what)

    def _modified(self, path: str, details: dict[str, Any]) -> float:
        """Return a file's modification time, whose key depends on the fsspec filesystem; else the current time."""
        for key in ("mtime", "LastModified", "last_modified", "created"):
            value = details.get(key)
            if isinstance(value, datetime):
                value = value.timestamp()
            if isinstance(value, (int, float)):
                return float(value)
        try:
            return float(self._fs.modified(path).timestamp())  # obstore's listings do not contain it
        except (NotImplementedError, FileNotFoundError):
            return time.time()

    def _path(self, sha256: str) -> str:
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise GymError(ErrorCode.USAGE, f"{sha256[:80]!r} is not a sha256 in hex")
        return f"{self._root}/{sha256[:2]}/{sha256}"
