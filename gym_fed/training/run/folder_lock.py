"""A lock of a folder for one process. The system releases it when the process ends, even by a kill."""

from __future__ import annotations

import os
import warnings
from io import FileIO
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import LockHeldError, lock
from gym_fed.core.portable import O_NONBLOCK, read_at
from gym_fed.training.run.reproducibility import RunWarning

LOCK_FILE = ".lock"


class FolderLock:
    """A lock that is held from construction until ``release``.

    Args:
        folder: One that exists; ``.lock`` in it is the file that is locked.

    Raises:
        GymError: ``STATE_LOCKED`` naming the process that holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file: FileIO | None = (folder / LOCK_FILE).open("a+b", buffering=0)
        try:
            lock(self._file)
        except LockHeldError as error:
            holder = read_at(self._file.fileno(), 20, 0).decode("ascii", errors="replace") or "unknown"
            self.release()
            raise GymError(
                ErrorCode.STATE_LOCKED,
                f"{folder}: another process ({holder}) is at work in it",
                "wait for it or stop it, or choose another output_dir",
            ) from error
        except OSError as error:  # a file system without locks
            warnings.warn(
                f"{folder}: cannot be locked ({error.strerror}); let no other process work in it",
                RunWarning,
                stacklevel=2,
            )
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_held(folder: Path) -> bool | None:
    """Return True if a process uses the folder; None if no lock was ever taken, or locks are not supported."""
    try:
        # Opening a named pipe would wait for a writer.
        number = os.open(folder / LOCK_FILE, os.O_RDONLY | O_NONBLOCK)
    except OSError:
        return None
    with FileIO(number) as file:
        try:
            lock(file, shared=True)
        except LockHeldError:
            return True
        except OSError:  # a file system without locks
            return None
    return False
