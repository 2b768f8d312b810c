"""Lock files and folders. The system releases a lock when the file is closed or the process ends.

POSIX uses ``flock``. On Windows one byte far beyond the end of the file is locked, so that other processes can read its
content. ``msvcrt`` has no shared locks, so a shared lock is exclusive there.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO

from gym_fed.core.portable import O_BINARY, opens_folders

_LOCKED_BYTE = 0x40000000
"""Offset of the byte to lock on Windows; like SQLite's, it is beyond any content."""
_TRY_AGAIN_SECONDS = 0.02


class LockHeldError(BlockingIOError):
    """Another open file holds the lock."""

    def __init__(self) -> None:
        super().__init__(errno.EWOULDBLOCK, "another process holds the lock")


def lock(file: int | IO[bytes] | IO[str], *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed or ``unlock`` is called.

    Args:
        file: A file object, or a descriptor.
        shared: True for a shared lock, which others may hold at the same time.
        wait: True to wait until the lock is free.

    Raises:
        LockHeldError: If ``wait`` is False and another open file holds the lock.
        OSError: If the file system does not support locks.
    """
    descriptor = file if isinstance(file, int) else file.fileno()
    if (fcntl := _module("fcntl")) is None:
        _lock_byte(descriptor, wait)
        return
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockHeldError from error


def unlock(file: int | IO[bytes] | IO[str]) -> None:
    """Release the lock of a file that stays open."""
    descriptor = file if isinstance(file, int) else file.fileno()
    if (fcntl := _module("fcntl")) is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    elif (msvcrt := _module("msvcrt")) is not None:
        with _at_locked_byte(descriptor):
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)


@contextmanager
def lockable_folder(folder: Path, *, follow: bool = False) -> Iterator[int]:
    """Open a file descriptor to lock a folder: the folder's own, or that of an adjacent file if folders cannot be
    opened.

    Args:
        folder: An existing folder.
        follow: True to also accept a symbolic link to a folder.

    Raises:
        OSError: If there is no such folder.
    """
    if opens_folders():
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if follow else os.O_NOFOLLOW))
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        return
    if not folder.is_dir() or (folder.is_symlink() and not follow):
        raise NotADirectoryError(errno.ENOTDIR, "no folder", str(folder))
    whole = folder.absolute()
    lock_file = whole.parent / f".{whole.name}.lock"
    descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | O_BINARY, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        with suppress(OSError):  # another process has the file open and will remove it
            lock_file.unlink()


def is_still_there(descriptor: int, folder: Path) -> bool:
    """Return True if the path still refers to the locked folder, which an earlier lock holder may have removed."""
    if not os.path.lexists(folder):
        return False
    return not opens_folders() or os.path.samestat(os.fstat(descriptor), os.lstat(folder))


@cache
def _module(name: str) -> ModuleType | None:
    """Import ``fcntl`` (POSIX) or ``msvcrt`` (Windows); None on the other system."""
    try:
        return __import__(name)
    except ImportError:
        return None


def _lock_byte(descriptor: int, wait: bool) -> None:
    if (msvcrt := _module("msvcrt")) is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with _at_locked_byte(descriptor):
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                return
            except PermissionError as error:
                if not wait:
                    raise LockHeldError from error
            time.sleep(_TRY_AGAIN_SECONDS)


@contextmanager
def _at_locked_byte(descriptor: int) -> Iterator[None]:
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        yield
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)
