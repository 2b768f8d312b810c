"""Receive data files from a page in parts, without overwriting other files."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import full_disk_named, is_safe_path, make_folder, whole_file_or_none
from gym_fed.core.text import counted, plain, readable_bytes
from gym_fed.data.files import SUFFIXES
from gym_fed.web.app import Changing

PART_BYTES = 2 * 2**20
"""Bytes per request, below the limit of request bodies."""
MAX_OPEN = 8
_IDLE_SECONDS = 3600.0
_SPARE_BYTES = 256 * 2**20
"""Bytes of free disk space that an upload must leave."""


@dataclass
class _Upload:
    file: Path
    size_bytes: int
    room: AbstractContextManager[Path]
    """Renames the part file if it ends without an error; see ``whole_file_or_none``."""
    part: Path
    touched_at: float
    received_bytes: int = 0

    def drop(self) -> None:
        """Remove the part file."""
        error = TimeoutError()
        self.room.__exit__(type(error), error, None)


class Uploads:
    """The uploads in progress. Safe from any thread.

    Args:
        folder: Returns the folder of the files, or raises; the folder is created if it is missing.
        named: Returns the name under which pages refer to a file.
    """

    def __init__(self, folder: Callable[[], Path], named: Callable[[Path], str]) -> None:
        self._folder, self._named = folder, named
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, size_bytes: int) -> str:
        """Reserve a file and return the id of its upload.

        Raises:
            GymError: ``USAGE`` for a name without the suffix of a data file; ``DATA_INVALID`` for an empty file;
                ``DISK_FULL``; ``BUSY`` for too many uploads.
        """
        if not is_safe_path(name) or "/" in name or name.startswith("."):
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(name, 200)!r} is not a safe file name",
                "rename the file, and drop it again",
            )
        if not name.lower().removesuffix(".gz").endswith(SUFFIXES):
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(name, 200)}: this file type has no rows",
                f"use a file that ends with {', '.join(SUFFIXES)}, or one of these with .gz",
            )
        if not size_bytes:
            raise GymError(ErrorCode.DATA_INVALID, f"{plain(name, 200)} is empty", "choose a file with rows")
        folder = self._folder()
        with self._lock:
            self._forget_idle()
            if len(self._uploads) >= MAX_OPEN:
                raise GymError(
                    ErrorCode.BUSY, f"{counted(MAX_OPEN, 'file')} are being uploaded", "wait for one of them"
                )
            make_folder(folder)
            promised = sum(upload.size_bytes - upload.received_bytes for upload in self._uploads.values())
            free = shutil.disk_usage(folder).free - promised - _SPARE_BYTES
            if size_bytes > free:
                raise GymError(
                    ErrorCode.DISK_FULL,
                    f"{plain(name, 200)} has {readable_bytes(size_bytes)}, and the disk has room for "
                    f"{readable_bytes(max(free, 0))}",
                    "free some space on it",
                )
            reserved = {upload.file for upload in self._uploads.values()}
            id, file = secrets.token_hex(16), _free(folder / name, reserved)
            room = whole_file_or_none(file)
            self._uploads[id] = _Upload(file, size_bytes, room, room.__enter__(), time.monotonic())
        return id

    def append(self, id: str, offset: int, data: bytes) -> str | None:
        """Append a part; return the file's name after the last part, otherwise None.

        Raises:
            GymError: ``NOT_FOUND`` for an unknown id; ``USAGE`` for an offset other than the next;
                ``TOO_LARGE`` for more bytes than announced; ``DISK_FULL``.
        """
        with self._lock:
            upload = self._uploads.get(id)
            if upload is None:
                raise GymError(ErrorCode.NOT_FOUND, "there is no such upload", "drop the file again")
            if offset != upload.received_bytes:
                raise GymError(
                    ErrorCode.USAGE,
                    f"offset {offset} is not the next, {upload.received_bytes}",
                    "drop the file again",
                )
            if offset + len(data) > upload.size_bytes:
                raise GymError(
                    ErrorCode.TOO_LARGE,
                    f"more than the announced {counted(upload.size_bytes, 'byte')}",
                    "drop the file again when no program is writing it",
                )
            with full_disk_named(upload.part), upload.part.open("ab") as file:
                file.truncate(offset)  # a failed part may have been written partially
                file.write(data)
            upload.received_bytes += len(data)
            upload.touched_at = time.monotonic()
            if upload.received_bytes < upload.size_bytes:
                return None
            del self._uploads[id]
            upload.room.__exit__(None, None, None)
        return self._named(upload.file)

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - _IDLE_SECONDS
        for id, upload in list(self._uploads.items()):
            if upload.touched_at < oldest:
                del self._uploads[id]
                upload.drop()


def _free(file: Path, reserved: set[Path]) -> Path:
    """Return a path that is neither in use nor reserved: the file's own, or the first one with a number."""
    stem, dot, suffix = file.name.partition(".")
    names = (file.name if number == 1 else f"{stem}-{number}{dot}{suffix}" for number in range(1, 1000))
    for candidate in map(file.with_name, names):
        if candidate not in reserved and not candidate.exists():
            return candidate
    raise GymError(ErrorCode.FILE_EXISTS, f"{file.name}: 999 such files exist", "rename the file")


class _NewUpload(StrictModel):
    name: str = Field(min_length=1, max_length=200)
    bytes: int = Field(ge=0, le=2**50)


def add_upload_routes(
    router: APIRouter, uploads: Uploads, received: Callable[[], None] = lambda: None
) -> None:
    """Add the routes below ``/data/uploads``; ``received`` is called after the last part of a file."""

    @router.post("/data/uploads")
    def upload(given: _NewUpload, visitor: Changing) -> dict[str, Any]:
        """Begin an upload; return its id, and the bytes of a part."""
        return {"id": uploads.begin(given.name, given.bytes), "part_bytes": PART_BYTES}

    @router.put("/data/uploads/{id}")
    def part(
        id: str,
        visitor: Changing,
        content: Annotated[bytes, Body(media_type="application/octet-stream", max_length=PART_BYTES)],
        offset: Annotated[int, Query(ge=0, le=2**50)] = 0,
    ) -> dict[str, Any]:
        """Append a part; return the file's name after the last one, otherwise null."""
        name = uploads.append(id, offset, content)
        if name is not None:
            received()
        return {"name": name}
