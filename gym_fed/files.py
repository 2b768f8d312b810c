"""Files that are either whole or absent: written beside their place, synced, renamed, and the folder synced too."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gym_fed.errors import ErrorCode, GymError
from gym_fed.system_errors import is_disk_full


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A binary file, readable too, that takes ``path``'s place if the block ends well, else is removed.

    ``mode`` holds from the first byte on, so that a secret is never readable by others, even while it is written.

    Raises:
        GymError: ``DISK_FULL`` when nothing more fits; ``path`` is as it was.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with full_disk_named(path):
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync_folder(path.parent)


@contextmanager
def whole_or_not_at_all(path: Path) -> Iterator[Path]:
    """A new folder beside ``path`` that takes its name if the block ends well, else is removed."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` so that a crash leaves the old or the new content, never a mixture."""
    with atomic_file(path, mode) as file:
        file.write(data)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file of its folder, each with its line end; they are on the disk when this returns."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("ab") as file:
        file.writelines(line.encode("utf-8") + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        fsync_folder(path.parent)


def file_sha256(path: Path) -> str:
    """Lower-case hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, so that they survive a power cut; one that is there stays as it is.

    What is synced inside a folder is lost with it while its own name is not on the disk.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Name the file that a full disk, or a used-up quota, has no room for.

    Raises:
        GymError: ``DISK_FULL`` in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def disk_full(path: Path) -> GymError:
    """That what belongs to a file could not be written; nothing that was there is lost."""
    return GymError(
        ErrorCode.DISK_FULL,
        f"no space is left for {path}; nothing was changed",
        "free some space on that disk, and run the same again",
    )


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last line end, which a kill left half written, so that lines may be appended again."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
