"""What lies beside an exported file: its record, its model card and the licences of the model in it; they come before
the file."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock, lockable_folder
from gym_fed.core.files import file_sha256, write_atomically
from gym_fed.core.json_files import read_object
from gym_fed.export.source import TRAVELS

RECORD = "export.json"
CARD_BESIDE = "card.md"
"""The model card's name beside a file, after the file's own name."""


def beside(path: Path, name: str) -> Path:
    """Where ``name`` of the file ``path`` lies."""
    return path.with_name(f"{path.name}.{name}")


def require_none_beside(path: Path, *, licences: bool) -> None:
    """Refuse a new file ``path`` beside which a record lies, or a licence where it has some.

    A record without its file, which a killed export left, is no hindrance, nor are the licences whose sha256 it holds.

    Raises:
        GymError: ``FILE_EXISTS`` naming the first one.
    """
    record = beside(path, RECORD)
    left = _left(record, path)
    found = [file for file in (record, beside(path, CARD_BESIDE)) if os.path.lexists(file)]
    for pattern in TRAVELS if licences else ():
        found += sorted(path.parent.glob(f"{glob.escape(path.name)}.{pattern}"))
    for file in found:
        is_left = file == record and bool(left)
        if not is_left and not (_is_plain(file) and left.get(file.name) == file_sha256(file)):
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"{file} exists, and belongs beside {path.name}",
                "move it away, or choose another name",
            )


@contextmanager
def written_beside(path: Path, files: Mapping[str, bytes], sha256: str, *, licences: bool) -> Iterator[None]:
    """Write ``files`` by their names, the record first; the file ``path`` comes when the block ends.

    They are removed where it does not come. Exports into one folder go through here one at a time, so that a record is
    of the file that is there.

    Args:
        path: The new file.
        files: What lies beside it.
        sha256: Of the new file.
        licences: See ``require_none_beside``.

    Raises:
        GymError: ``FILE_EXISTS`` when something else took a name meanwhile; ``DISK_FULL``.
    """
    with _one_at_a_time(path.parent):
        if os.path.lexists(path):
            raise GymError(
                ErrorCode.FILE_EXISTS, f"{path} exists: another process wrote it", "choose another name"
            )
        require_none_beside(path, licences=licences)
        try:
            for name, data in files.items():
                write_atomically(path.with_name(name), data)
            yield
        except BaseException:
            if not (_is_plain(path) and file_sha256(path) == sha256):
                for name in files:
                    path.with_name(name).unlink(missing_ok=True)
            raise


def _left(record: Path, path: Path) -> Mapping[str, str]:
    """sha256 by name of what a record without its file says of it and of its licences; empty for anything else."""
    files: object = None
    if _is_plain(record) and not os.path.lexists(path):
        with suppress(OSError, GymError):  # no record of ours, and refused as such
            files = read_object(record).get("files")
    return files if isinstance(files, dict) and path.name in files else {}


def _is_plain(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    with lockable_folder(folder, follow=True) as descriptor:
        with suppress(OSError):  # a disk without locks
            lock(descriptor, wait=True)
        yield
