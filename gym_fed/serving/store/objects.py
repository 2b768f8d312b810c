"""The variants' bytes: content-addressed `.gymdelta` files, whole or absent, and hashed again whenever they changed."""

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
"""A copy that was not touched for so long was left by a kill: no copy takes that long between two blocks."""
_BLOCK_BYTES = 1 << 20
_SYNCS_AT_ONCE = 8
"""A disk takes several at once in hardly more time than one."""

Identity = tuple[int, int, int, int]
"""Inode, size, and times of the last change of content and of anything, in nanoseconds."""


@dataclass(frozen=True)
class Staged:
    """A whole copy that is not in its place yet."""

    path: Path
    sha256: str
    size_bytes: int
    is_synced: bool


class DeltaObjects:
    """``objects/ab/<sha256>.gymdelta`` below a folder, and ``staging/`` for unfinished copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "objects"
        self.staging = folder / "staging"
        for made in (self.folder, self.staging):
            make_folder(made, 0o700)
        self._hashed: dict[str, Identity] = {}
        self._lock = threading.Lock()

    def path(self, sha256: str) -> Path:
        """Where an object is, or would be."""
        return self.folder / sha256[:2] / f"{sha256}{SUFFIX}"

    @contextmanager
    def staged(self, source: Path) -> Iterator[Staged]:
        """A copy of a file, the store's own, hashed while it is copied; gone after the block unless it was adopted.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``DISK_FULL``.
        """
        staged = self.stage(source)
        try:
            if not self._is_whole(staged.sha256):  # else ``adopt`` has no use for the copy
                self.sync([staged.path])
                staged = replace(staged, is_synced=True)
            yield staged
        finally:
            staged.path.unlink(missing_ok=True)

    def stage(self, source: Path) -> Staged:
        """A copy as in ``staged``, which the caller syncs, and unlinks where it is not adopted.

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
        """Bring the bytes of files to the disk, several at once.

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
        """``adopt`` of many synced copies: each folder that a file was put in is synced once, after the last."""
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
        """Make what was renamed into folders survive a power cut, several at once."""
        with ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="variant-sync") as threads:
            for _ in threads.map(fsync_folder, folders):
                pass

    def adopt(self, staged: Staged) -> None:
        """Put a copy in its place, durably; a damaged object that is there is replaced, a whole one is kept.

        Call it inside the registry's write transaction: ``gc`` holds the same lock, and so takes nothing away between
        this and the row.
        """
        target = self.path(staged.sha256)
        if self._is_whole(staged.sha256):
            return
        with full_disk_named(target):
            make_folder(target.parent, 0o700)
            if not staged.is_synced:  # the object was there, and went meanwhile
                self.sync([staged.path])
            move_file(staged.path, target)
            failpoint("variant-renamed")
            fsync_folder(target.parent)
        with self._lock:
            self._hashed[staged.sha256] = _identity(os.stat(target))

    def identity(self, sha256: str) -> Identity | None:
        """Changes when a file is no longer the one that was hashed; None where the file cannot be read."""
        try:
            return _identity(os.stat(self.path(sha256)))
        except OSError:
            return None

    def verify(self, sha256: str, *, again: bool = False) -> Identity:
        """Check that an object's bytes hash to its name: once, and again when the file changed or ``again``.

        Raises:
            GymError: ``FILE_NOT_FOUND`` or ``HASH_MISMATCH``, naming the file.
        """
        path = self.path(sha256)
        found = self.identity(sha256)
        if found is not None and not again:
            with self._lock:
                if self._hashed.get(sha256) == found:
                    return found
        actual, identity = _hash(path)
        if actual != sha256:
            with self._lock:
                self._hashed.pop(sha256, None)
            raise GymError(ErrorCode.HASH_MISMATCH, f"{path} hashes to {actual}, not to its name")
        with self._lock:
            self._hashed[sha256] = identity
        return identity

    def forget(self, sha256: str) -> None:
        """Remove an object that no variant has; the registry's write lock is held by the caller."""
        self.path(sha256).unlink(missing_ok=True)
        with self._lock:
            self._hashed.pop(sha256, None)

    def collect(self, is_used: Callable[[str], bool]) -> tuple[int, int]:
        """Remove objects that no variant has, and copies that a kill left; returns how many files and bytes.

        The registry's write lock is held by the caller.
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
        # Without O_NONBLOCK, the opening of a named pipe waits for somebody to write to it.
        descriptor = os.open(path, access | O_BINARY | O_NONBLOCK)
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path}: {error.strerror}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path} is {what}, not a .gymdelta")
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with (
        full_disk_named(path),
        _readable(path, os.O_RDWR) as descriptor,
    ):  # Windows syncs no file open to be read
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
    """Sha256 of a file, and the identity that it had before it was read."""
    with _readable(path) as descriptor:
        identity = _identity(os.fstat(descriptor))
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), identity


def _identity(found: os.stat_result) -> Identity:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
