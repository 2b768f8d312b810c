"""sha256 of a source, remembered: a file of 5 GB is hashed when it is new or changed, not by every command.

``imports/.digests/<sha256 of the path>.json`` holds a file's size, times and inode beside its digest. A file that was
changed in the last seconds is not remembered, for the clock of a disk is coarse.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gym_fed.core.files import file_sha256, write_atomically
from gym_fed.core.json_files import read_object

_SETTLED_SECONDS = 3.0


def source_digest(
    files: list[Path], store: Path, before_hashing: Callable[[list[Path]], None] = lambda _: None
) -> str:
    """Lower-case hex sha256 of one file, or of ``[[name, digest], ...]`` of several as JSON.

    Args:
        files: Of the source.
        store: Folder of what is remembered.
        before_hashing: Gets those that are not remembered, where there are some.
    """
    remembered = {file: _remembered(file, store) for file in files}
    if new := [file for file, digest in remembered.items() if digest is None]:
        before_hashing(new)
    found = [(file.name, remembered[file] or _hashed(file, store)) for file in files]
    if len(found) == 1:
        return found[0][1]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def state_of(files: list[Path]) -> list[list[int]]:
    """What changes with a file's content: size, times and inode of each."""
    return [_state(file) for file in files]


def _remembered(file: Path, store: Path) -> str | None:
    with suppress(OSError, ValueError, AttributeError):  # absent, or not ours: it is hashed again
        known = read_object(_note(file, store))
        if known.get("state") == _state(file) and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
    return None


def _hashed(file: Path, store: Path) -> str:
    before = _state(file)
    digest = file_sha256(file)
    changed = max(before[1], before[2]) / 1e9
    if _state(file) == before and time.time() - changed > _SETTLED_SECONDS:
        write_atomically(_note(file, store), json.dumps({"state": before, "sha256": digest}).encode())
    return digest


def _note(file: Path, store: Path) -> Path:
    path = os.path.realpath(file)
    return store / ".digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()}.json"


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
