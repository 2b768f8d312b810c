"""Atomic file operations (write to a temporary name, sync, rename, sync the folder), and the limit of open files."""

from __future__ import annotations

import errno
import glob
import hashlib
import logging
import os
import re
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
from gym_fed.core.text import counted, is_visible


def default_home() -> Path:
    """Return ``$GYM_HOME``, or ``~/.gym-fed``."""
    return Path(os.environ.get("GYM_HOME") or "~/.gym-fed").expanduser()


_BLOCK_BYTES = 1 << 20
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])\s*(\..*)?", re.IGNORECASE)
"""Device names that Windows reserves in every folder, with any extension."""
_SPACES = "\u00a0\u202f\u200c\u200d"
"""Invisible characters that are allowed in names: the names of macOS screenshots contain narrow spaces; Persian and
emoji need joiners."""


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary binary file for reading and writing, which replaces ``path`` if the block succeeds.

    The file has ``mode`` from the start, so that a secret is never readable by others, even while it is written.

    Raises:
        GymError: ``DISK_FULL`` if the disk is full; ``path`` is unchanged.
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
        GymError: ``FILE_EXISTS`` if something else was created at ``path`` in the meantime.
    """
    with _room_beside(path) as room:
        part = room / path.name
        part.mkdir()
        yield part
        try:
            part.rename(path)  # can replace only an empty folder
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise _name_taken(path) from error
            raise
        fsync_folder(path.parent)


@contextmanager
def whole_file_or_none(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that is renamed to ``path`` if the block succeeds.

    Raises:
        GymError: ``FILE_EXISTS`` if something else was created at ``path`` in the meantime.
    """
    with _room_beside(path) as room:
        part = room / path.name
        yield part
        try:
            os.link(part, path)
        except FileExistsError as error:
            raise _name_taken(path) from error
        except OSError as error:  # the file system has no hard links
            if os.path.lexists(path):
                raise _name_taken(path) from error
            part.rename(path)
        fsync_folder(path.parent)


@contextmanager
def whole_file_in_place(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces ``path`` if the block succeeds."""
    with _room_beside(path) as room:
        part = room / path.name
        yield part
        part.replace(path)
        fsync_folder(path.parent)


def remove_left_parts(folder: Path, name: str = "*") -> None:
    """Remove temporary files and folders that killed processes left for ``name`` in ``folder``.

    Files in use are recognised by their lock, which the system releases when the process ends.
    """
    for left in folder.glob(f".{name}.*.part"):
        with _lock(left) as is_left:
            if is_left:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _room_beside(path: Path) -> Iterator[Path]:
    """Create a hidden temporary folder on the same disk for the block, and remove those that killed processes left."""
    make_folder(path.parent)
    remove_left_parts(path.parent, glob.escape(path.name))
    with ExitStack() as stack:
        is_own = False
        while not is_own:  # another process may remove the folder before it is locked
            room = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
            is_own = stack.enter_context(_lock(room, without=True))
        try:
            yield room
        finally:
            shutil.rmtree(room, ignore_errors=True)


@contextmanager
def _lock(folder: Path, *, without: bool = False) -> Iterator[bool]:
    """Hold a folder's lock in the block, if it exists and is free; with ``without``, also on a disk without locks."""
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
        except OSError:  # no lock support, or the folder was just removed
            is_held = without and folder.is_dir()
        yield is_held


def _name_taken(path: Path) -> GymError:
    return GymError(
        ErrorCode.FILE_EXISTS,
        f"{path} exists: another process has just written it",
        "check that file, and choose another name",
    )


def real_path(path: Path) -> Path:
    """Resolve all links of a path, which does not have to exist.

    Before Python 3.13 ``Path.resolve`` raises ``RuntimeError`` for a symlink loop; this function never does.
    """
    return Path(os.path.realpath(path))


def require_no_links(path: Path) -> None:
    """Refuse links to files outside of a folder that is written to, also to missing files; or a file that is a link.

    Folders may be links, to another disk for example. Folders that they lead to are not searched.

    Raises:
        GymError: ``FILE_EXISTS`` with the link.
    """
    own = real_path(path if path.is_dir() else path.parent)
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in inside if path.is_dir() else [path]:
        if file.is_symlink() and not real_path(file).is_relative_to(own):
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{file} is a link, so a file outside of its folder would be overwritten",
                "remove the link, or choose another folder",
            )


def lies_in(file: Path, folder: Path) -> bool:
    """Return True if a file is inside ``folder`` and does not link outside it (the Hub cache links to ``blobs``)."""
    target, own = real_path(file), real_path(folder)
    blobs = own.parent.parent / "blobs"
    return target.is_file() and (
        target.parent == own or (own.parent.name == "snapshots" and target.parent == blobs)
    )


def is_safe_path(text: str) -> bool:
    """Return True if a path of untrusted origin stays inside the folder that it is joined to, on every system.

    Windows reads ``C:x``, ``a:b`` (a stream of ``a``), backslashes, device names such as ``nul.txt`` and names that end
    with a dot or a space in its own way, so such paths are refused on every system.
    """
    parts = text.split("/")
    return (
        0 < len(text) <= 1024
        and all((is_visible(each) or each in _SPACES) and each not in "\\:" for each in text)
        and all(part.rstrip(". ") == part != "" and len(part.encode()) <= 255 for part in parts)
        and not any(_DEVICE.fullmatch(part) for part in parts)
    )


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` so that a crash leaves the old or the new content, never a mixture."""
    with atomic_file(path, mode) as file:
        file.write(data)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file and sync it."""
    is_new = not path.exists() or not path.stat().st_size
    with path.open("ab") as file:
        file.writelines(line.encode("utf-8") + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        fsync_folder(path.parent)


def file_sha256(path: Path) -> str:
    """Return the lower-case hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_hashed(
    source: IO[bytes], target: IO[bytes] | None = None, max_bytes: int | None = None
) -> tuple[str, int]:
    """Read a stream until its end, or until it exceeds ``max_bytes``, and copy it to ``target`` if given.

    Returns:
        The sha256 and the number of bytes read.
    """
    digest, size = hashlib.sha256(), 0
    while (max_bytes is None or size <= max_bytes) and (block := source.read(_BLOCK_BYTES)):
        digest.update(block)
        size += len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest(), size


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and its parents durably; an existing folder is unchanged.

    A power failure loses synced files in a folder if the folder's own entry was not synced. The home folder
    contains keys and always gets mode 0700.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        is_home = folder.absolute() == default_home().absolute()
    except RuntimeError:  # no home directory, as in a container with an arbitrary uid
        is_home = False
    folder.mkdir(0o700 if is_home else mode, exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Sync a folder, so that renames in it survive a power failure; does nothing on Windows."""
    if not opens_folders():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path) -> None:
    """Sync a file, or a folder with all its content; its entry in the parent folder is not synced."""
    entries = [*path.rglob("*"), path] if path.is_dir() else [path]
    for entry in entries:
        if entry.is_dir():
            fsync_folder(entry)
        elif entry.is_file():
            # Windows can sync only files that are open for writing.
            descriptor = os.open(entry, (os.O_RDONLY if opens_folders() else os.O_RDWR) | O_BINARY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Convert errors for a full disk or an exhausted quota to a ``GymError`` that names the file.

    Raises:
        GymError: ``DISK_FULL``, in place of an error from the system, or from a library that quotes it.
    """
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


def disk_full(path: Path) -> GymError:
    """Return the error for a full disk; earlier content of the file is not lost."""
    return GymError(
        ErrorCode.DISK_FULL,
        f"no space is left for {path}; nothing was changed",
        "free some space on that disk, and run the same command again",
    )


def drop_torn_line(path: Path) -> None:
    """Truncate a file after its last newline, so that lines can be appended after a crash."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)


_SPARE_FILES = 256
"""Number of open files to reserve for databases, models and logs, besides the connections."""
_MIN_FILES = 64
"""Minimum number of open files; with fewer, gRPC aborts the process or files cannot be opened during a round."""


def raise_file_limit(connections: int, log: logging.Logger) -> int:
    """Raise the limit of open files as far as the hard limit allows.

    Args:
        connections: Number of connections needed.
        log: Logger for a warning if the limit is too low.

    Returns:
        The number of connections that are possible: ``connections``, or fewer if the hard limit is too low.

    Raises:
        GymError: ``BUSY`` if the hard limit is too low for any connection.
    """
    try:
        import resource
    except ImportError:  # not available on Windows
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = connections + _SPARE_FILES
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, num_files)
    if hard < _MIN_FILES:
        raise GymError(
            ErrorCode.BUSY,
            f"this process may open {counted(hard, 'file')}, but a server needs at least {_MIN_FILES}",
            "raise the hard limit (ulimit -Hn, or LimitNOFILE= in systemd)",
        )
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    fitting = max(16, hard - _SPARE_FILES)
    if fitting < connections:
        log.warning(
            "this process may open %d files, enough for %d connections instead of %d; raise the hard limit "
            "(ulimit -Hn, or LimitNOFILE= in systemd)",
            hard,
            fitting,
            connections,
        )
    return min(fitting, connections)
