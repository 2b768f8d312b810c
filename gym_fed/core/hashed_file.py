"""Write a file in blocks and hash it at the same time; a thread writes and syncs the blocks.

    with HashedFile(file) as written:
        for block in blocks:
            written.write(block)
        sha256 = written.finish()   # every byte is on disk now

Only a few blocks are kept in memory. ``hashlib`` and the system calls release the GIL, so writing overlaps with
receiving the data.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from types import TracebackType
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
"""Size of the blocks in which files are read, in bytes."""
_BLOCKS_WAITING = 8
_SYNC_BYTES = 16 << 20
"""Number of bytes between two syncs, so that the last sync is short."""


class HashedFile:
    """Append to a file opened for reading and writing; existing content is hashed first.

    Args:
        file: A binary file at any position; blocks are appended to its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._blocks: queue.Queue[bytes | None] = queue.Queue(_BLOCKS_WAITING)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hashed-file", daemon=True)
        self._thread.start()

    def write(self, block: bytes) -> None:
        """Queue the next block; wait while several blocks are pending.

        Raises:
            OSError: If an earlier block could not be written.
        """
        if self._failure is not None:
            raise self._failure
        self._blocks.put(block)

    def finish(self) -> str:
        """Wait until everything is synced, and return the lower-case hex sha256 of the file.

        Raises:
            OSError: If a block could not be written or synced.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        return self._digest.hexdigest()

    def close(self) -> None:
        """Write the queued blocks and stop the thread. May be called repeatedly."""
        if self._thread.is_alive():
            self._blocks.put(None)
        self._thread.join()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        unsynced = 0
        block: bytes | None = b""
        try:
            self._file.seek(0)
            while there := self._file.read(BLOCK_BYTES):
                self._digest.update(there)
            while (block := self._blocks.get()) is not None:
                self._digest.update(block)
                self._file.write(block)
                unsynced += len(block)
                if unsynced >= _SYNC_BYTES:
                    self._sync()
                    unsynced = 0
            self._sync()
        except BaseException as error:  # noqa: BLE001 (the caller's thread raises it)
            self._failure = error
            while block is not None:  # unblock a writer that waits for the queue
                block = self._blocks.get()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
