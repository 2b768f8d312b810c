"""Backup destinations (a folder or any fsspec URL), and the manifest that lists a snapshot's files by sha256.

objects/ab/<sha256>              every object, stored once and shared by snapshots
snapshots/<time>-<entries>/      database, config, keys and state of one moment, and manifest.json, written last
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, ValidationError, field_validator

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import copy_hashed, fsync_folder, is_safe_path, make_folder
from gym_fed.core.json_files import MAX_BYTES, MAX_DEPTH, is_deeper
from gym_fed.core.portable import O_BINARY
from gym_fed.trust.ledger.heads import SignedHead
from gym_server.store.remote import file_system

MANIFEST = "manifest.json"
DATABASE = "database"
"""Name of the database copy in a snapshot, an SQLite file."""
_READ_BYTES = 1 << 20
_PARTIAL = ".partial"


class File(StrictModel):
    """A file of a snapshot."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class SnapshotManifest(StrictModel):
    """The files of a snapshot and the state of its ledger. A snapshot without a manifest is unfinished."""

    format: Literal["gym-backup-2"] = "gym-backup-2"
    server: str = Field(pattern=r"^s[0-9a-f]{16}$")
    created_at: int
    software_version: str
    head: dict[str, Any] | None
    """The newest signed head of the ledger in the database's copy; None for an empty ledger."""
    files: dict[str, File]
    """Files by path inside the hub's folder; ``DATABASE`` is the database."""
    objects: dict[str, int]
    """Sizes in bytes, by sha256."""
    records: dict[str, File] = Field(default_factory=dict)
    """Evaluation records by path inside the hub's folder; they are stored with the objects."""

    @property
    def stored(self) -> set[str]:
        """Return the sha256 of every file of this snapshot that is stored with the objects."""
        return {*self.objects, *(file.sha256 for file in self.records.values())}

    @field_validator("files", "records")
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        for name in files:
            if not is_safe_path(name):
                raise ValueError(f"{name!r} is not a path inside the folder")
        return files

    @property
    def signed_head(self) -> SignedHead | None:
        """Return ``head``, parsed."""
        return None if self.head is None else SignedHead.from_dict(self.head)

    @property
    def size(self) -> int:
        """Return the number of ledger entries."""
        head = self.signed_head
        return 0 if head is None else head.size

    @classmethod
    def from_dict(cls, document: Any) -> SnapshotManifest:
        """Parse a manifest; raise ``STATE_CORRUPT`` if it is invalid."""
        try:
            found = cls.model_validate(document)
            _ = found.signed_head
        except (ValidationError, GymError) as error:
            what = first_problem(error) if isinstance(error, ValidationError) else error.message
            raise GymError(ErrorCode.STATE_CORRUPT, f"invalid manifest of a backup: {what}") from error
        return found


class Place:
    """One destination of backups.

    Args:
        url: A folder, or an fsspec URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = file_system(url, "the location of the backup")
        self._root = str(root).rstrip("/")
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def put(self, local: Path, name: str) -> tuple[str, int]:
        """Copy a local file to ``name`` atomically; return the sha256 and size of the copied bytes."""
        target = f"{self._root}/{name}"
        if self._is_local:
            make_folder(Path(target).parent)
        else:
            self._fs.makedirs(self._fs._parent(target), exist_ok=True)
        written = f"{target}.{secrets.token_hex(8)}{_PARTIAL}" if self._is_local else target
        try:
            with open(local, "rb") as source, self._fs.open(written, "wb") as file:
                sha256, size = copy_hashed(source, file)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
            if self._is_local:
                os.replace(written, target)
                fsync_folder(Path(target).parent)
        except BaseException:
            with suppress(OSError):
                self._fs.rm_file(written)
            raise
        return sha256, size

    def get(self, name: str, local: Path, sha256: str, mode: int = 0o600) -> None:
        """Copy ``name`` to a new local file.

        Raises:
            GymError: ``STATE_CORRUPT`` if it is missing or has a different sha256.
        """
        local.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(local, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY, mode)
        with os.fdopen(descriptor, "wb") as file:
            self.check(name, sha256, file)
            file.flush()
            os.fsync(file.fileno())

    def check(self, name: str, sha256: str, copy: IO[bytes] | None = None) -> None:
        """Raise ``STATE_CORRUPT`` unless ``name`` exists with this sha256; its content is written to ``copy``."""
        digest = hashlib.sha256()
        for block in self._blocks(name):
            digest.update(block)
            if copy is not None:
                copy.write(block)
        if digest.hexdigest() != sha256:
            raise self._corrupt(name, f"has sha256 {digest.hexdigest()}, but its manifest says {sha256}")

    def manifests(self) -> dict[str, SnapshotManifest]:
        """Return every finished snapshot by name, oldest first.

        Raises:
            GymError: ``STATE_CORRUPT`` for a manifest that cannot be read.
        """
        found = {}
        for path in sorted(self._find("snapshots")):
            folder, _, file = path.rpartition("/")
            if file == MANIFEST:
                name = folder.rpartition("/")[2]
                found[name] = SnapshotManifest.from_dict(self._json(path, f"snapshots/{name}/{MANIFEST}"))
        return dict(sorted(found.items(), key=lambda item: (item[1].created_at, item[0])))

    def objects(self) -> dict[str, int]:
        """Return every stored object with its size in bytes."""
        found = {}
        for path, details in self._find("objects").items():
            name = path.rpartition("/")[2]
            if len(name) == 64:
                found[name] = int(details["size"])
        return found

    def drop_unfinished(self) -> int:
        """Delete the remains of killed backups (snapshots without a manifest, partial files); return their number."""
        finished = {f"{self._root}/snapshots/{name}" for name in self.manifests()}
        gone = 0
        for path in [*self._find("snapshots"), *self._find("objects")]:
            in_snapshot = path.startswith(f"{self._root}/snapshots/")
            if path.endswith(_PARTIAL) or (
                in_snapshot and path.rpartition("/")[0] not in _parents(finished, path)
            ):
                self._fs.rm_file(path)
                gone += 1
        if self._is_local:
            _drop_empty(Path(self._root) / "snapshots")
        return gone

    def drop(self, snapshot: str) -> None:
        """Delete a snapshot, its manifest first, so that an interruption leaves an unfinished snapshot."""
        folder = f"snapshots/{snapshot}"
        self._fs.rm_file(f"{self._root}/{folder}/{MANIFEST}")
        for path in self._find(folder):
            self._fs.rm_file(path)
        if self._is_local:
            _drop_empty(Path(self._root) / "snapshots")

    def drop_objects(self, names: set[str]) -> None:
        """Delete objects."""
        for name in names:
            self._fs.rm_file(f"{self._root}/{object_name(name)}")

    def _find(self, folder: str) -> dict[str, dict[str, int]]:
        try:
            return dict(self._fs.find(f"{self._root}/{folder}", detail=True))
        except FileNotFoundError:
            return {}

    def _json(self, path: str, name: str) -> Any:
        """Read the untrusted JSON document at ``path``, with limits on its size and depth."""
        with self._fs.open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise self._corrupt(name, f"is larger than {MAX_BYTES} bytes")
        try:
            document = json.loads(data)
        except ValueError as error:
            raise self._corrupt(name, "is not JSON") from error
        except RecursionError as error:
            raise self._corrupt(name, "is nested too deeply") from error
        if is_deeper(document, MAX_DEPTH):
            raise self._corrupt(name, "is nested too deeply")
        return document

    def _blocks(self, name: str) -> Iterator[bytes]:
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                while block := file.read(_READ_BYTES):
                    yield block
        except FileNotFoundError as error:
            raise self._corrupt(name, "is missing") from error

    def _corrupt(self, name: str, what: str) -> GymError:
        return GymError(
            ErrorCode.STATE_CORRUPT, f"{self.url}: {name} {what}", "choose another snapshot: --snapshot NAME"
        )


def object_name(sha256: str) -> str:
    """Return the path of an object inside a destination."""
    return f"objects/{sha256[:2]}/{sha256}"


def _parents(finished: set[str], path: str) -> set[str]:
    """Return the folders of ``path`` that are inside a finished snapshot."""
    return {folder for one in finished if path.startswith(one + "/") for folder in [path.rpartition("/")[0]]}


def _drop_empty(root: Path) -> None:
    if root.is_dir():
        for folder in root.iterdir():
            if folder.is_dir() and not any(path.is_file() for path in folder.rglob("*")):
                shutil.rmtree(folder)
