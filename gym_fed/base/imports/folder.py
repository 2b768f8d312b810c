"""The cache of imported models: one folder per source, named by its sha256 and written by one process.

The sha256 of a source is cached, so that a file of 5 GB is hashed only if it is new or changed:
``imports/.digests/<sha256 of the path>.json`` contains its size, times, inode and digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.imports.gguf.reader import GgufImporter
from gym_fed.base.imports.importer import Importer
from gym_fed.base.imports.quantised import QuantisedImporter
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock
from gym_fed.core.files import (
    default_home,
    file_sha256,
    full_disk_named,
    make_folder,
    whole_or_not_at_all,
    write_atomically,
)
from gym_fed.core.json_files import read_object
from gym_fed.core.text import readable_bytes

IMPORTERS: tuple[Importer, ...] = (GgufImporter(), QuantisedImporter())
"""The importers, in the order in which they are tried."""

NOTE = "import.json"
"""Metadata file in each folder: ``source``, ``sha256``, ``format``, importer ``version``, ``files`` with sizes."""
_SPARE_BYTES = 64 << 20
_HASHED_SILENTLY_BYTES = 10**9
"""Maximum size in bytes of files that are hashed without a message, since a disk reads them in seconds."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ = (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model", ".gguf")
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class ImportedModel:
    """An imported model in the cache."""

    folder: Path
    source: str
    format: str
    bytes: int


def imports_home() -> Path:
    """Return the folder of the cache: ``$GYM_HOME/imports``, or ``~/.gym-fed/imports``."""
    return default_home() / "imports"


def usable_folder(folder: Path) -> Path:
    """Return a model folder itself, or its import if its format needs conversion.

    Raises:
        GymError: ``MODEL_INVALID`` if the folder has a special file; errors from ``imported``.
    """
    _require_ordinary(folder)
    return folder if importer_of(folder) is None else imported(folder)


def importer_of(source: Path) -> Importer | None:
    """Return the importer of ``source``; None for a model folder that needs none."""
    return next((importer for importer in IMPORTERS if importer.takes(source)), None)


def _require_ordinary(folder: Path) -> None:
    """Reject named pipes, devices and sockets, which would block the libraries that read a model's files."""
    for entry in (*folder.iterdir(), *(folder / _TEMPLATES).glob("*")):
        with suppress(OSError):  # loading reports broken links
            mode = entry.stat().st_mode
            if entry.suffix in _READ and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise GymError(
                    ErrorCode.MODEL_INVALID,
                    f"{entry} cannot be read: not a regular file",
                    "restore it, or use another folder",
                )


def imported(source: Path) -> Path:
    """Import a model of another format into the cache unless it is already there, and return its folder.

    Raises:
        GymError: ``USAGE`` for an unsupported format; ``MODEL_INVALID`` for a source that is unreadable or changes
            during the import; ``MISSING_DEPENDENCY``; ``DISK_FULL`` before anything is written.
    """
    importer = importer_of(source)
    if importer is None:
        raise GymError(
            ErrorCode.USAGE,
            f"{source}: not a format that can be imported",
            "use a .gguf file or a model folder",
        )
    home = imports_home()
    files = importer.files(source)
    before = state_of(files)
    digest = source_digest(files, home, lambda new: _before_hashing(importer, source, new))
    folder = home / digest
    if _is_whole(folder, importer):
        return folder
    with _one_at_a_time(home, digest):
        if not _is_whole(folder, importer):  # another process may have imported it in the meantime
            _remove(folder)
            _import_into(importer, source, digest, folder)
            if state_of(files) != before:
                _remove(folder)
                raise GymError(
                    ErrorCode.MODEL_INVALID,
                    f"{source}: changed while it was being read; nothing was imported",
                    "run the same command again when the file is complete",
                )
    return folder


def imported_models() -> list[ImportedModel]:
    """Return the imported models in the cache, by name of the source."""
    home = imports_home()
    models = []
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if _DIGEST.fullmatch(folder.name):
            note = _note(folder)
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
            models.append(
                ImportedModel(folder, str(note.get("source", "")), str(note.get("format", "")), size)
            )
    return sorted(models, key=lambda model: model.source)


def _before_hashing(importer: Importer, source: Path, new: list[Path]) -> None:
    """Check the header and report the size before hashing, which takes seconds."""
    from gym_fed.core.console import err

    importer.require_header(source)
    size = sum(file.stat().st_size for file in new)
    if size > _HASHED_SILENTLY_BYTES:
        err.print(f"hashing {source}: {readable_bytes(size)}")


def _import_into(importer: Importer, source: Path, digest: str, folder: Path) -> None:
    from gym_fed.core.console import err
    from gym_fed.core.progress import progress_bar

    needed = importer.bytes_needed(source)
    make_folder(folder.parent)
    free = shutil.disk_usage(folder.parent).free
    if needed + _SPARE_BYTES > free:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"{source}: the imported model needs {readable_bytes(needed)}, but {folder.parent} has room for "
            f"{readable_bytes(free)}",
            "free some space there, or set GYM_HOME to a folder on another disk",
        )
    description = importer.describe(source)
    err.print(f"importing {source} ({description}): {readable_bytes(needed)} in {folder}")
    with (
        full_disk_named(folder),
        whole_or_not_at_all(folder) as part,
        progress_bar(f"importing {source.name}", unit="bytes") as report,
    ):
        importer.write(source, part, report)
        note = {
            "source": os.path.realpath(source),
            "sha256": digest,
            "format": importer.name,
            "version": importer.version,
            "files": {file.name: file.stat().st_size for file in sorted(part.iterdir())},
        }
        (part / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _note(folder: Path) -> dict[str, Any]:
    with suppress(OSError, GymError):  # missing or invalid: import again
        return read_object(folder / NOTE)
    return {}


def _is_whole(folder: Path, importer: Importer) -> bool:
    """Return True if this importer created the folder and every file has its recorded size."""
    note = _note(folder)
    files = note.get("files")
    if note.get("format") != importer.name or note.get("version") != importer.version:
        return False
    if not isinstance(files, dict) or not files:
        return False
    try:
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except OSError:
        return False


def _remove(folder: Path) -> None:
    """Rename a folder before deleting it, so that no other process sees part of it."""
    if not os.path.lexists(folder):
        return
    room = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    folder.rename(room / folder.name)
    shutil.rmtree(room)


@contextmanager
def _one_at_a_time(home: Path, digest: str) -> Iterator[None]:
    """Hold the lock of a source; other processes wait for the import."""
    make_folder(home / ".locks")
    descriptor = os.open(home / ".locks" / digest, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # without locks, two processes may import, and one result is kept
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


_SETTLED_SECONDS = 3.0
"""Minimum age of a file's last change at which its digest is cached, since file system clocks are coarse."""


def source_digest(
    files: list[Path], store: Path, before_hashing: Callable[[list[Path]], None] = lambda _: None
) -> str:
    """Compute the hex sha256 of one file, or of ``[[name, digest], ...]`` of several files as JSON.

    Args:
        files: Files of the source.
        store: Folder of cached digests.
        before_hashing: Called with the files that have no cached digest, if there are any.
    """
    cached = {file: _cached_digest(file, store) for file in files}
    if new := [file for file, digest in cached.items() if digest is None]:
        before_hashing(new)
    digests = [(file.name, cached[file] or _hashed(file, store)) for file in files]
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def state_of(files: list[Path]) -> list[list[int]]:
    """Return size, times and inode of each file, which change with its content."""
    return [_state(file) for file in files]


def _cached_digest(file: Path, store: Path) -> str | None:
    with suppress(OSError, ValueError, AttributeError):  # missing or invalid: hash again
        known = read_object(_digest_note(file, store))
        if known.get("state") == _state(file) and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
    return None


def _hashed(file: Path, store: Path) -> str:
    before = _state(file)
    digest = file_sha256(file)
    changed = max(before[1], before[2]) / 1e9
    if _state(file) == before and time.time() - changed > _SETTLED_SECONDS:
        write_atomically(_digest_note(file, store), json.dumps({"state": before, "sha256": digest}).encode())
    return digest


def _digest_note(file: Path, store: Path) -> Path:
    path = os.path.realpath(file)
    return store / ".digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


def _state(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
