"""Content-addressed `.gymdelta` files, which are stored atomically and hashed again if they change."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import fsync_folder, full_disk_named, make_folder, move_file
from gym_fed.core.portable import O_BINARY, O_NONBLOCK

SUFFIX = ".gymdelta"
STAGING_GRACE_SECONDS = 3600.0
"""Seconds after which an unchanged copy counts as a leftover of a killed process, since copying never pauses so
long."""
_BLOCK_BYTES = 1 << 20
_SYNCS_AT_ONCE = 8
"""Number of parallel syncs; together they take hardly longer than one."""

Identity = tuple[int, int, int, int]
"""A file's inode, size, and times of the last change of content and of metadata, in nanoseconds."""


@dataclass(frozen=True)
class Staged:
    """A complete copy that is not in its final path yet."""

    path: Path
    sha256: str
    size_bytes: int
    is_synced: bool


class DeltaObjects:
    """The files ``objects/ab/<sha256>.gymdelta`` in a folder, and ``staging/`` for unfinished copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "objects"
        self.staging = folder / "staging"
        for made in (self.folder, self.staging):
            make_folder(made, 0o700)
        self._hashed: dict[str, Identity] = {}
        self._lock = threading.Lock()

    def path(self, sha256: str) -> Path:
        """Return the path of an object, which need not exist."""
        return self.folder / sha256[:2] / f"{sha256}{SUFFIX}"

    @contextmanager
    def staged(self, source: Path) -> Iterator[Staged]:
        """Copy a file into the store, and hash it; the copy is removed after the block unless it was adopted.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``DISK_FULL``.
        """
        staged = self.stage(source)
        try:
            if not self._is_whole(staged.sha256):  # otherwise ``adopt`` does not need the copy
                self.sync([staged.path])
                staged = replace(staged, is_synced=True)
            yield staged
        finally:
            staged.path.unlink(missing_ok=True)

    def stage(self, source: Path) -> Staged:
        """Copy a file like ``staged``, but leave it to the caller to sync the copy, and to unlink it if not adopted.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``DISK_FULL``.
        """
        target = self.staging / f"{secrets.token_hex(16)}.partial"
        digest, size = hashlib.sha256(), 0
        try:
            with full_disk_named(target), _readable(source) as reading, _private(target) as writing:
                while block := os.read(reading, _BLOCK_BYTES):
                    digest.update(block)
                    size += len(block)
                    _write_all(writing, block)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return Staged(target, digest.hexdigest(), size, is_synced=False)

    def sync(self, paths: Iterable[Path]) -> None:
        """Sync files to disk in parallel.

        Raises:
            GymError: ``DISK_FULL``.
        """
        waiting = list(paths)
        if len(waiting) == 1:
            _sync(waiting[0])
            return
        with ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="variant-sync") as threads:
            for _ in threads.map(_sync, waiting):
                pass

    def adopt_all(self, copies: Iterable[Staged]) -> None:
        """Adopt many synced copies; each folder is synced once, after the last."""
        changed: set[Path] = set()
        for staged in copies:
            target = self.path(staged.sha256)
            if self._is_whole(staged.sha256):
                continue
            with full_disk_named(target):
                if target.parent not in changed:
                    target.parent.mkdir(0o700, exist_ok=True)
                    changed.add(target.parent)
                move_file(staged.path, target)
            with self._lock:
                self._hashed[staged.sha256] = _identity(os.stat(target))
        failpoint("variants-renamed")
        if changed:
            self.sync_folders([self.folder, *sorted(changed)])

    @staticmethod
    def sync_folders(folders: Iterable[Path]) -> None:
        """Sync folders to disk in parallel, to make renames into them durable."""
        with ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="variant-sync") as threads:
            for _ in threads.map(fsync_folder, folders):
                pass

    def adopt(self, staged: Staged) -> None:
        """Move a copy durably to its final path; a damaged object there is replaced, an intact one is kept.

        Call this in the registry's write transaction: ``gc`` holds the same lock, so it cannot delete the object before
        the row is inserted.
        """
        target = self.path(staged.sha256)
        if self._is_whole(staged.sha256):
            return
        with full_disk_named(target):
            make_folder(target.parent, 0o700)
            if not staged.is_synced:  # the object existed, but has been deleted meanwhile
                self.sync([staged.path])
            move_file(staged.path, target)
            failpoint("variant-renamed")
            fsync_folder(target.parent)
        with self._lock:
            self._hashed[staged.sha256] = _identity(os.stat(target))

    def identity(self, sha256: str) -> Identity | None:
        """Return a value that changes when the file is modified or replaced; None if it cannot be read."""
        try:
            return _identity(os.stat(self.path(sha256)))
        except OSError:
            return None

    def verify(self, sha256: str, *, again: bool = False) -> Identity:
        """Check that an object's bytes hash to its name, once, and again if the file changed or ``again`` is set.

        Raises:
            GymError: ``FILE_NOT_FOUND`` or ``HASH_MISMATCH``, naming the file.
        """
        path = self.path(sha256)
        current = self.identity(sha256)
        if current is not None and not again:
            with self._lock:
                if self._hashed.get(sha256) == current:
                    return current
        actual, identity = _hash(path)
        if actual != sha256:
            with self._lock:
                self._hashed.pop(sha256, None)
            raise GymError(
                ErrorCode.HASH_MISMATCH, f"{path} hashes to {actual}, which does not match its name"
            )
        with self._lock:
            self._hashed[sha256] = identity
        return identity

    def forget(self, sha256: str) -> None:
        """Remove an unused object; the caller must hold the registry's write lock."""
        self.path(sha256).unlink(missing_ok=True)
        with self._lock:
            self._hashed.pop(sha256, None)

    def collect(self, is_used: Callable[[str], bool]) -> tuple[int, int]:
        """Remove unused objects and leftover copies; return the numbers of files and bytes.

        The caller must hold the registry's write lock.
        """
        oldest = time.time() - STAGING_GRACE_SECONDS
        doomed = [p for p in self.staging.glob("*.partial") if p.stat().st_mtime < oldest]
        doomed += [p for p in self.folder.glob(f"*/*{SUFFIX}") if not is_used(p.name.removesuffix(SUFFIX))]
        total = 0
        for path in doomed:
            total += path.stat().st_size
            path.unlink()
            with self._lock:
                self._hashed.pop(path.name.removesuffix(SUFFIX), None)
        return len(doomed), total

    def _is_whole(self, sha256: str) -> bool:
        try:
            self.verify(sha256)
        except GymError:
            return False
        return True


@contextmanager
def _readable(path: Path, access: int = os.O_RDONLY) -> Iterator[int]:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, access | O_BINARY | O_NONBLOCK)
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path}: {error.strerror}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            problem = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path} is {problem}, not a .gymdelta")
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    # Windows cannot sync a file that is open for reading
    with full_disk_named(path), _readable(path, os.O_RDWR) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _private(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]


def _hash(path: Path) -> tuple[str, Identity]:
    """Return the SHA-256 of a file, and its identity before it was read."""
    with _readable(path) as descriptor:
        identity = _identity(os.fstat(descriptor))
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), identity


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
