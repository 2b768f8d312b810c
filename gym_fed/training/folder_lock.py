"""One process at a time in a folder. The system frees the lock when a process ends, however it does."""

from __future__ import annotations

import fcntl
import warnings
from pathlib import Path
from typing import BinaryIO

from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.reproducibility import RunWarning

LOCK_FILE = ".lock"


class FolderLock:
    """Held from the making of the object until ``release``.

    Args:
        folder: One that exists; ``.lock`` in it is the file that is locked.

    Raises:
        GymError: ``STATE_LOCKED`` when another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO | None = (folder / LOCK_FILE).open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise GymError(
                ErrorCode.STATE_LOCKED,
                f"{folder}: another process is at work in it",
                "wait for it, or choose another output_dir",
            ) from error
        except OSError as error:  # a file system without locks
            warnings.warn(
                f"{folder}: cannot be locked ({error.strerror}); let no other process work in it",
                RunWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
