"""Store objects by sha256 in a folder or object store: atomic uploads, resumable and verified downloads."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import IO, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import atomic_file, copy_hashed, disk_full, file_sha256, fsync_folder, make_folder
from gym_fed.core.portable import O_BINARY, O_NONBLOCK
from gym_fed.core.text import counted
from gym_fed.data.files import filesystem

_BLOCK_BYTES = 1 << 20
_MAX_READ_BYTES = 32 << 20


class Objects:
    """A content-addressed store in a folder or at an fsspec URL.

    Args:
        url: The location; a plain path is a local folder, which is created on the first write.
    """

    def __init__(self, url: str | Path) -> None:
        from fsspec.implementations.local import LocalFileSystem

        self.url = str(url).rstrip("/")
        self._fs, root, _ = filesystem(url)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._root = str(Path(root).absolute()) if self._is_local else root.rstrip("/")

    @property
    def place(self) -> str:
        """The normalised address of the store, the same for all spellings of its folder."""
        return self._root if self._is_local else self.url

    def is_there(self) -> bool:
        """Return True if the folder exists, or if anything is stored below the URL."""
        return bool(self._fs.exists(self._root))

    def put(self, file: Path, sha256: str) -> None:
        """Store a local file unless the store has it already.

        Raises:
            GymError: ``DATA_INVALID`` if the file has changed since it was hashed.
        """
        target = f"{self._root}/{_object(sha256)}"
        if self._fs.exists(target) and self._fs.info(target)["size"] == file.stat().st_size:
            return
        if self._is_local:
            with atomic_file(Path(target)) as part:
                digest = _copy(file, part)
                _require(digest, sha256, file)
            return
        # A remote store creates an object when it is closed, so a killed process creates none.
        self._fs.makedirs(self._fs._parent(target), exist_ok=True)
        digest = ""
        try:
            with self._fs.open(target, "wb") as part:
                digest = _copy(file, part)
        finally:
            if digest != sha256 and self._fs.exists(target):
                self._fs.rm_file(target)
        _require(digest, sha256, file)

    def fetch(self, sha256: str, num_bytes: int, target: Path) -> None:
        """Download an object to ``target``, which must not exist; a partial file is resumed.

        Raises:
            GymError: ``NOT_FOUND``; ``DISK_FULL`` before a byte is written; ``STATE_CORRUPT`` if the object is not a
                regular file; ``HASH_MISMATCH`` if its bytes do not match its name, in which case the partial file is
                removed.
        """
        source = f"{self._root}/{_object(sha256)}"
        if not self._fs.exists(source):
            raise GymError(ErrorCode.NOT_FOUND, f"{self.url} has no object {sha256}", "push it again")
        make_folder(target.parent)
        part = target.with_name(f".{target.name}.{sha256[:16]}.part")
        start = part.stat().st_size if part.exists() else 0
        if start > num_bytes:
            part.unlink()
            start = 0
        if num_bytes - start > shutil.disk_usage(target.parent).free:
            raise disk_full(target)
        with self._open(source) as stream, part.open("ab") as out:
            stream.seek(start)
            seen = start  # read one byte more than the size, so that the hash of a longer object differs
            while block := stream.read(min(_BLOCK_BYTES, num_bytes + 1 - seen)):
                out.write(block)
                seen += len(block)
            out.flush()
            os.fsync(out.fileno())
        actual = file_sha256(part)
        if actual != sha256:
            part.unlink()
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"{self.url}/{_object(sha256)}: its content has SHA-256 {actual}",
                "the object is damaged: remove it from the store and push it again",
            )
        os.link(part, target)  # unlike a rename, this refuses to replace a file that appeared in the meantime
        part.unlink()
        fsync_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file; return False if it exists already."""
        target = f"{self._root}/{path}"
        if not self._is_local:
            self._fs.makedirs(self._fs._parent(target), exist_ok=True)
            return self._create_remote(target, data)
        make_folder(Path(target).parent)
        part = Path(target).with_name(f".{secrets.token_hex(8)}.partial")
        try:
            with part.open("xb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.link(part, target)
        except FileExistsError:
            return False
        finally:
            part.unlink(missing_ok=True)
        fsync_folder(part.parent)
        return True

    def _create_remote(self, target: str, data: bytes) -> bool:
        construct = getattr(self._fs, "_construct_store", None)
        if construct is None:
            try:
                self._fs.pipe_file(target, data, mode="create")
            except FileExistsError:
                return False
            return True
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        # obstore's file system accepts mode="create" but replaces the file anyway; its store respects it.
        bucket, path = self._fs._split_path(target)
        try:
            construct(bucket).put(path, data, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def read(self, path: str, limit: int = _MAX_READ_BYTES) -> bytes:
        """Read a small file.

        Raises:
            GymError: ``TOO_LARGE`` for more than ``limit`` bytes; ``STATE_CORRUPT`` if it is not a regular file.
            FileNotFoundError: If it does not exist.
        """
        target = f"{self._root}/{path}"
        if int(self._fs.info(target)["size"]) > limit:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"{self.url}/{path} has more than {counted(limit, 'byte')}",
                "it differs from what was pushed: check the store",
            )
        with self._open(target) as stream:
            data = bytes(stream.read(limit + 1))
        if len(data) > limit:  # the file has grown after its size was read
            raise GymError(ErrorCode.TOO_LARGE, f"{self.url}/{path} has more than {counted(limit, 'byte')}")
        return data

    def has(self, sha256: str, num_bytes: int) -> bool:
        """Return True if an object of the right size exists; its bytes are not read."""
        target = f"{self._root}/{_object(sha256)}"
        return bool(self._fs.exists(target)) and int(self._fs.info(target)["size"]) == num_bytes

    def digest(self, sha256: str, num_bytes: int) -> str | None:
        """Return the sha256 of a stored object, or None if it is missing. A longer object is not read to its end.

        Raises:
            GymError: ``STATE_CORRUPT`` if it is not a regular file.
        """
        target = f"{self._root}/{_object(sha256)}"
        if not self._fs.exists(target):
            return None
        with self._open(target) as stream:
            return copy_hashed(stream, max_bytes=num_bytes)[0]

    def _open(self, path: str) -> IO[bytes]:
        """Open a file. Local files must be regular ones, since a named pipe would block forever."""
        if not self._is_local:
            return self._fs.open(path, "rb")  # type: ignore[no-any-return]
        descriptor = os.open(path, os.O_RDONLY | O_BINARY | O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _no_file(path)
        return os.fdopen(descriptor, "rb")

    def names(self, folder: str) -> list[str]:
        """List the file names in a folder; empty if it does not exist."""
        return [path for path in self.tree(folder) if "/" not in path]

    def tree(self, folder: str) -> list[str]:
        """List the paths of all files below a folder, relative to it."""
        root = f"{self._root}/{folder}"
        self._fs.invalidate_cache()
        if not self._fs.exists(root):
            return []
        return [str(path)[len(root) :].lstrip("/") for path in self._fs.find(root)]


def _object(sha256: str) -> str:
    return f"objects/{sha256[:2]}/{sha256}"


def _no_file(path: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"{path} is not a regular file",
        "it differs from what was pushed: check the store",
    )


def _copy(file: Path, out: Any) -> str:
    with file.open("rb") as stream:
        return copy_hashed(stream, out)[0]


def _require(digest: str, sha256: str, file: Path) -> None:
    if digest != sha256:
        raise GymError(ErrorCode.DATA_INVALID, f"{file} changed while it was read", "push it again")
