"""Files that torch's own archive writer fills: a full disk is an error, not the end of the process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast


@contextmanager
def archive_file(path: Path) -> Iterator[IO[bytes]]:
    """What torch writes the archive ``path`` through.

    Raises:
        OSError: When the block ends, what writing has failed by.
    """
    with path.open("wb") as file:
        archive = _Archive(file)
        yield cast("IO[bytes]", archive)
        archive.require_whole()


class _Archive(io.RawIOBase):
    """Keeps the first failure of the system for later: torch's writer, which ends its archive in its destructor, aborts
    the process where that fails."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self._failed is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._failed = error
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """torch goes back to the beginning when all is written."""
        return 0 if self._failed is not None else self._file.seek(offset, whence)

    def require_whole(self) -> None:
        """Raise what has failed."""
        if self._failed is not None:
            raise self._failed
