"""Atomic writes: a file is written under a temporary name, synced and renamed, and its folder is synced."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import LockHeldError, is_still_there, lock, lockable_folder
from gym_fed.core.portable import O_BINARY, opens_folders
from gym_fed.core.system_errors import is_disk_full


def default_home() -> Path:
    """Return ``$GYM_HOME``, or ``~/.gym-fed``."""
    return Path(os.environ.get("GYM_HOME") or "~/.gym-fed").expanduser()


_BLOCK_BYTES = 1 << 20


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
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | O_BINARY, mode)
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


def move_file(source: Path, target: Path) -> None:
    """Move a file atomically; the caller must sync the target's folder.

    A rename between two file systems fails (``EXDEV``); the file is then copied next to ``target`` and renamed.

    Raises:
        GymError: ``DISK_FULL`` if the copy does not fit; ``source`` is unchanged.
    """
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with open(source, "rb") as file, atomic_file(target, source.stat().st_mode & 0o777) as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
        source.unlink()


@contextmanager
def whole_or_not_at_all(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` if the block succeeds, and removed otherwise.

    Raises:
        GymError: ``FILE_EXISTS`` when something else took the name meanwhile.
    """
    with _room_beside(path) as room:
        part = room / path.name
        part.mkdir()
        yield part
        try:
            part.rename(path)  # an empty folder would be replaced, and nothing else
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _name_taken(path) from error
            raise
        fsync_folder(path.parent)


@contextmanager
def whole_file_or_none(path: Path) -> Iterator[Path]:
    """The path of a file that the block writes, which becomes ``path`` if the block ends well.

    Raises:
        GymError: ``FILE_EXISTS`` when something else took the name meanwhile.
    """
    with _room_beside(path) as room:
        part = room / path.name
        yield part
        try:
            os.link(part, path)
        except FileExistsError as error:
            raise _name_taken(path) from error
        except OSError as error:  # a disk without hard links
            if os.path.lexists(path):
                raise _name_taken(path) from error
            part.rename(path)
        fsync_folder(path.parent)


@contextmanager
def whole_file_in_place(path: Path) -> Iterator[Path]:
    """The path of a file that the block writes, which takes ``path``'s place if the block ends well."""
    with _room_beside(path) as room:
        part = room / path.name
        yield part
        part.replace(path)
        fsync_folder(path.parent)


def remove_left_parts(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left of a file or folder, or of all in ``folder``, that they wrote as a whole.

    A lock distinguishes it: it ends with its process, however that ends.
    """
    for left in folder.glob(f".{name}.*.part"):
        with _lock(left) as is_left:
            if is_left:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _room_beside(path: Path) -> Iterator[Path]:
    """A hidden folder on the same disk for this block alone; those of processes that were killed are removed first."""
    make_folder(path.parent)
    remove_left_parts(path.parent, glob.escape(path.name))
    with ExitStack() as stack:
        is_own = False
        while not is_own:  # another process may take a new room for one that was left
            room = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
            is_own = stack.enter_context(_lock(room, without=True))
        try:
            yield room
        finally:
            shutil.rmtree(room, ignore_errors=True)


@contextmanager
def _lock(folder: Path, *, without: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder, if it is there and no one has it; ``without``: also on a disk without locks."""
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(lockable_folder(folder))
        except OSError:
            yield False
            return
        try:
            lock(descriptor)
            is_held = is_still_there(descriptor, folder)
        except LockHeldError:
            is_held = False
        except OSError:  # no locks here, or the folder has just gone
            is_held = without and folder.is_dir()
        yield is_held


def _name_taken(path: Path) -> GymError:
    return GymError(
        ErrorCode.FILE_EXISTS,
        f"{path} exists: another process wrote it meanwhile",
        "look at what is there, and choose another name",
    )


def real_path(path: Path) -> Path:
    """Follow every link of a path, whether or not something is there.

    ``Path.resolve`` raises ``RuntimeError`` for a circle of links before Python 3.13 and gives a path from then on;
    this gives a path on every version.
    """
    return Path(os.path.realpath(path))


def lies_in(file: Path, folder: Path) -> bool:
    """True if a file is inside ``folder`` and no link out of it; the Hub's cache keeps its files in ``blobs``."""
    target, own = real_path(file), real_path(folder)
    blobs = own.parent.parent / "blobs"
    return target.is_file() and (
        target.parent == own or (own.parent.name == "snapshots" and target.parent == blobs)
    )


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


def copy_hashed(
    source: IO[bytes], target: IO[bytes] | None = None, max_bytes: int | None = None
) -> tuple[str, int]:
    """Read a stream in blocks to its end, or to the block that exceeds ``max_bytes``; copy it to ``target`` if given.

    Returns:
        The sha256 and the number of the bytes that were read.
    """
    digest, size = hashlib.sha256(), 0
    while (max_bytes is None or size <= max_bytes) and (block := source.read(_BLOCK_BYTES)):
        digest.update(block)
        size += len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest(), size


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, so that they survive a power cut; one that is there stays as it is.

    What is synced inside a folder is lost with it while its own name is not on the disk. The home, which holds keys,
    is made with mode 0700 whatever is written into it first.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        is_home = folder.absolute() == default_home().absolute()
    except RuntimeError:  # this user has no home, as in a container with an arbitrary uid
        is_home = False
    folder.mkdir(0o700 if is_home else mode, exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut; Windows has nothing to be called for that."""
    if not opens_folders():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Make a file, or a folder with everything in it, survive a power cut; its name in the folder above may not."""
    entries = [*path.rglob("*"), path] if path.is_dir() else [path]
    for entry in entries:
        if entry.is_dir():
            fsync_folder(entry)
        elif entry.is_file():
            # Windows syncs only what was opened for writing.
            descriptor = os.open(entry, (os.O_RDONLY if opens_folders() else os.O_RDWR) | O_BINARY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Name the file that a full disk, or a used-up quota, has no room for.

    Raises:
        GymError: ``DISK_FULL`` in place of the error of the system, or of a library that passes it on as text.
    """
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def disk_full(path: Path) -> GymError:
    """Return the error that a file could not be written; no earlier content is lost."""
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
