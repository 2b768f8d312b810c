"""Cache Arrow files that later runs memory-map; their names are digests of their inputs.

::

    $GYM_HOME/cache/arrow/<digest>.arrow    rows, or encoded rows
    $GYM_HOME/cache/arrow/<digest>.json     its size and digest, facts about it, and their digest

The folder has mode 0700 and its files 0600, because rows may be private. Above ``MAX_CACHE_BYTES``, the least recently
used files that no process maps are removed. The folder may be deleted while no run is starting; the files are then
written again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gym_fed.core import console
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import LockHeldError, is_still_there, lock
from gym_fed.core.files import (
    default_home,
    file_sha256,
    make_folder,
    remove_left_parts,
    whole_file_in_place,
    write_atomically,
)
from gym_fed.core.portable import O_BINARY, opens_folders, own_user
from gym_fed.core.system_errors import is_disk_full
from gym_fed.core.text import counted, readable_bytes
from gym_fed.version import __version__

FORMAT_VERSION = 2
"""Version of the format and of how rows are read and encoded; incremented with every change."""
MAX_CACHE_BYTES = 100 * 10**9
"""Maximum total size of the files in the common folder."""

_SPACE = "cached rows take about seven times the size of their source files"

_held_files: dict[Path, IO[bytes]] = {}
"""Files that this process maps. Shared locks, held as long as the process runs, prevent their removal."""


def recipe_digest(recipe: Any) -> str:
    """Return the file name for ``recipe``, a JSON value with everything that determines the contents."""
    text = json.dumps([FORMAT_VERSION, __version__, recipe], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ArrowCache:
    """A cached file.

    Args:
        digest: The result of ``recipe_digest``.
        folder: Folder of the file, instead of the common one; file modes there follow the umask, and nothing is
            removed.
    """

    def __init__(self, digest: str, folder: Path | None = None) -> None:
        self._is_common = folder is None
        folder = default_home() / "cache" / "arrow" if folder is None else folder
        self.path = folder / f"{digest}.arrow"
        self._index = self.path.with_suffix(".json")

    def is_filled(self) -> bool:
        """Return True if the file was written completely and has the size it was written with."""
        try:
            return bool(self._read()["bytes"] == self.path.stat().st_size)
        except (OSError, ValueError):
            return False

    def is_intact(self) -> bool:
        """Read and check the whole file, and prevent its removal while this process runs.

        A file whose bytes or index have changed is reported on standard error; ``fill`` writes it again.

        Returns:
            True if the file may be mapped.
        """
        self._close_to_others()
        if not self._index.is_file() or not self._hold(self.path):
            return False
        is_intact = False
        with suppress(ValueError):
            index = self._read()
            same_size = self.path.stat().st_size == index["bytes"]
            is_intact = same_size and file_sha256(self.path) == str(index["sha256"])
        if is_intact:
            with suppress(OSError):  # on a read-only disk, nothing is removed
                os.utime(self.path)
        else:
            console.err.print(f"{self.path}: its bytes have changed; it will be rewritten")
        return is_intact

    def facts(self) -> dict[str, Any]:
        """Return the facts that ``fill`` stored.

        Raises:
            ValueError: If the index has changed since it was written.
        """
        return dict(self._read()["facts"])

    def fill(
        self,
        write: Callable[[IO[bytes]], Iterator[int]],
        facts: Callable[[], dict[str, Any]],
        digest_now: Callable[[], str] | None = None,
    ) -> Generator[int, None, None]:
        """Write the file, yielding the items that ``write`` yields; the file is valid after the last item.

        Args:
            write: Function that writes the contents to a binary file.
            facts: Called after the last item; its JSON is stored next to the file.
            digest_now: Called after the last item. If the digest has changed, a source changed while it was being read,
                and the file is discarded.

        Raises:
            GymError: ``DISK_FULL``; ``TOO_LARGE`` above the process's file size limit.
        """
        folder = self.path.parent
        self._close_to_others()
        make_folder(folder, 0o700 if self._is_common else 0o777)
        remove_left_parts(folder, "*.arrow")
        with suppress(_SourceChangedError), self._full_disk_named(), whole_file_in_place(self.path) as part:
            with open(part, "xb", opener=self._created) as sink:
                yield from write(sink)
                sink.flush()
                os.fsync(sink.fileno())
            if digest_now is not None and digest_now() != self.path.stem:
                raise _SourceChangedError
            index = {"bytes": part.stat().st_size, "sha256": file_sha256(part), "facts": facts()}
            index["index_sha256"] = _index_digest(index)
            text = json.dumps(index, indent=1, sort_keys=True)
            write_atomically(self._index, text.encode(), 0o600 if self._is_common else 0o644)
            self._hold(part)
        if self._is_common:
            _remove_least_recent(folder)

    def _read(self) -> dict[str, Any]:
        """Return the index.

        Raises:
            ValueError: If it has changed since it was written.
        """
        index = json.loads(self._index.read_text(encoding="utf-8"))
        if not isinstance(index, dict) or index.pop("index_sha256", None) != _index_digest(index):
            raise ValueError(f"{self._index}: its bytes have changed")
        return index

    @contextmanager
    def _full_disk_named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            is_limit = isinstance(error, OSError) and error.errno == errno.EFBIG
            is_full = is_disk_full(error) or (
                isinstance(error, GymError) and error.code is ErrorCode.DISK_FULL
            )
            if not is_limit and not is_full:
                raise
            code = ErrorCode.TOO_LARGE if is_limit else ErrorCode.DISK_FULL
            cause = "the file would be too large" if is_limit else "no space is left"
            way = "raise the limit (ulimit -f)" if is_limit else f"free some space ({_SPACE})"
            if self._is_common:
                way += f", delete {self.path.parent}, set GYM_HOME to a folder on another disk, or set streaming: true"
            else:
                way += ", or choose another folder"
            raise GymError(
                code, f"{self.path}: {cause}; complete files in the folder are unchanged", way
            ) from error

    def _created(self, path: str, flags: int) -> int:
        return os.open(path, flags | O_BINARY, 0o600 if self._is_common else 0o666)

    def _close_to_others(self) -> None:
        """Remove other users' access to the common folder, if it exists and belongs to this user."""
        if not self._is_common or not self.path.parent.is_dir():
            return
        status = self.path.parent.stat()
        if status.st_uid == own_user() and status.st_mode & 0o077:
            self.path.parent.chmod(0o700)

    def _hold(self, file: Path) -> bool:
        """Lock ``file``, which is or will be ``path``, against removal; return False if it is missing."""
        if not opens_folders():  # on Windows, a mapped file cannot be removed
            return file.is_file()
        held = _held_files.get(self.path)
        if held is not None and is_still_there(held.fileno(), file):
            return True
        try:
            opened = file.open("rb")
        except FileNotFoundError:
            return False
        # on a file system without locks, no process removes files
        with suppress(OSError):
            lock(opened, shared=True, wait=True)
        if not is_still_there(opened.fileno(), file):  # it was removed while this process waited
            opened.close()
            return False
        if held is not None:
            held.close()
        _held_files[self.path] = opened
        return True


class _SourceChangedError(Exception):
    """A source changed while it was being read."""


def _index_digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _remove_least_recent(folder: Path) -> None:
    """Remove the least recently used files above ``MAX_CACHE_BYTES``, except those that a process maps."""
    used: list[tuple[float, int, Path]] = []
    for file in folder.glob("*.arrow"):
        with suppress(FileNotFoundError):  # another process has just removed it
            status = file.stat()
            used.append((status.st_mtime, status.st_size, file))
    room, removed = MAX_CACHE_BYTES, []
    for _, size, file in sorted(used, reverse=True):
        room -= size
        if room < 0 and _is_removed(file):
            removed.append(size)
    if removed:
        console.err.print(
            f"{folder} exceeded {readable_bytes(MAX_CACHE_BYTES)}: removed the least recently used "
            f"{counted(len(removed), 'file')} ({readable_bytes(sum(removed))})"
        )


def _is_removed(file: Path) -> bool:
    """Remove a file and its index; return False if it is in use."""
    try:
        with file.open("rb") as opened:
            if opens_folders():
                lock(opened)
                file.with_suffix(".json").unlink(missing_ok=True)
                file.unlink()
                return True
        file.unlink()  # Windows refuses to remove a mapped file
        file.with_suffix(".json").unlink(missing_ok=True)
    except (LockHeldError, FileNotFoundError):
        return False
    except OSError as error:
        console.err.print(f"{file} cannot be removed: {error}")
        return False
    return True
