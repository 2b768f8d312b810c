"""The cache of imported models: a folder by the sha256 of its source, whole or absent, made by one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.imports.digests import source_digest, state_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock
from gym_fed.core.files import default_home, full_disk_named, make_folder, whole_or_not_at_all
from gym_fed.core.json_files import read_object
from gym_fed.core.text import readable_bytes

if TYPE_CHECKING:
    from gym_fed.base.imports.importer import Importer

NOTE = "import.json"
"""In each folder: ``source``, ``sha256``, ``format``, ``version`` of its reader, ``files`` with their bytes."""
_SPARE_BYTES = 64 << 20
_HASHED_SILENTLY_BYTES = 10**9
"""A disk reads so much in seconds."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ = (".json", ".safetensors", ".bin", ".jinja", ".txt", ".model", ".gguf")
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class ImportedModel:
    """A folder of the cache."""

    folder: Path
    source: str
    format: str
    bytes: int


def imports_home() -> Path:
    """``$GYM_HOME/imports``, or ``~/.gym-fed/imports``."""
    return default_home() / "imports"


def usable_folder(folder: Path) -> Path:
    """A model folder as it is, or what was imported of it, where its format needs a reader.

    Raises:
        GymError: As ``imported``; ``MODEL_INVALID`` where something stands in the place of a file that is none.
    """
    from gym_fed.base.imports.formats import importer_of

    _require_ordinary(folder)
    return folder if importer_of(folder) is None else imported(folder)


def _require_ordinary(folder: Path) -> None:
    """Refuse named pipes, devices and sockets: the libraries that read a model's files would wait for them."""
    for entry in (*folder.iterdir(), *(folder / _TEMPLATES).glob("*")):
        with suppress(OSError):  # a link to nothing: loading reports it
            mode = entry.stat().st_mode
            if entry.suffix in _READ and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise GymError(
                    ErrorCode.MODEL_INVALID,
                    f"{entry}: cannot be read: no ordinary file",
                    "restore it, or give another folder",
                )


def imported(source: Path) -> Path:
    """The model folder that a file or folder of another format becomes; made where it is not in the cache yet.

    Raises:
        GymError: ``USAGE`` for a format that is not read; ``MODEL_INVALID`` for a source that cannot be read, and for
            one that changes meanwhile; ``MISSING_DEPENDENCY``; ``DISK_FULL`` before anything is written.
    """
    from gym_fed.base.imports.formats import importer_of

    importer = importer_of(source)
    if importer is None:
        raise GymError(
            ErrorCode.USAGE, f"{source}: no format that is imported", "give a .gguf file or a model folder"
        )
    home = imports_home()
    files = importer.files(source)
    before = state_of(files)
    digest = source_digest(files, home, lambda new: _before_hashing(importer, source, new))
    folder = home / digest
    if _is_whole(folder, importer):
        return folder
    with _one_at_a_time(home, digest):
        if not _is_whole(folder, importer):  # another process may have made it meanwhile
            _remove(folder)
            _make(importer, source, digest, folder)
            if state_of(files) != before:
                _remove(folder)
                raise GymError(
                    ErrorCode.MODEL_INVALID,
                    f"{source}: changed while it was read; nothing was kept",
                    "run the same again when it is whole",
                )
    return folder


def imported_models() -> list[ImportedModel]:
    """What the cache holds, by name of the source."""
    home = imports_home()
    found = []
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if _DIGEST.fullmatch(folder.name):
            note = _note(folder)
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
            found.append(
                ImportedModel(folder, str(note.get("source", "")), str(note.get("format", "")), size)
            )
    return sorted(found, key=lambda one: one.source)


def _before_hashing(importer: Importer, source: Path, new: list[Path]) -> None:
    """Read the header first, and name the bytes whose hashing then takes seconds."""
    from gym_fed.core.console import err

    importer.require_header(source)
    size = sum(file.stat().st_size for file in new)
    if size > _HASHED_SILENTLY_BYTES:
        err.print(f"hashing {source}: {readable_bytes(size)}")


def _make(importer: Importer, source: Path, digest: str, folder: Path) -> None:
    from gym_fed.core.console import err

    needed = importer.bytes_needed(source)
    make_folder(folder.parent)
    free = shutil.disk_usage(folder.parent).free
    if needed + _SPARE_BYTES > free:
        raise GymError(
            ErrorCode.DISK_FULL,
            f"{source}: becomes a model folder of {readable_bytes(needed)}, and {folder.parent} has room for "
            f"{readable_bytes(free)}",
            "free some space there, or set GYM_HOME to a folder of another disk",
        )
    said = importer.describe(source)
    err.print(f"importing {source} ({said}): {readable_bytes(needed)} in {folder}")
    with full_disk_named(folder), whole_or_not_at_all(folder) as part, _progress(source.name) as report:
        importer.write(source, part, report)
        note = {
            "source": os.path.realpath(source),
            "sha256": digest,
            "format": importer.name,
            "version": importer.version,
            "files": {file.name: file.stat().st_size for file in sorted(part.iterdir())},
        }
        (part / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _progress(name: str) -> Iterator[Any]:
    """A bar on a terminal; nothing elsewhere."""
    from gym_fed.core.console import err

    if not err.is_terminal:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(f"importing {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _note(folder: Path) -> dict[str, Any]:
    with suppress(OSError, GymError):  # absent, or not ours: the folder is made again
        return read_object(folder / NOTE)
    return {}


def _is_whole(folder: Path, importer: Importer) -> bool:
    """Whether a folder is what this reader made, with every file in its size."""
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
    """Take a folder away under another name first, so that no one finds half of it."""
    if not os.path.lexists(folder):
        return
    room = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    folder.rename(room / folder.name)
    shutil.rmtree(room)


@contextmanager
def _one_at_a_time(home: Path, digest: str) -> Iterator[None]:
    """Hold the lock of a source; the other processes of a run wait for the one that imports."""
    make_folder(home / ".locks")
    descriptor = os.open(home / ".locks" / digest, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a disk without locks: two may do the same, and one of them is kept
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
