"""The interface of importers of other model formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

Report = Callable[[int, int], None]
"""Called with the bytes written so far, and their total."""


class Importer(ABC):
    """An importer of one format."""

    name: ClassVar[str]
    """The user's name of the format."""

    version: ClassVar[int]
    """Increased when the same source is imported differently; older imports are repeated."""

    @abstractmethod
    def takes(self, source: Path) -> bool:
        """Return True if an existing file or folder has this format; must be fast, since every command calls it."""

    @abstractmethod
    def files(self, source: Path) -> list[Path]:
        """Return the files that the result depends on, in a fixed order.

        Raises:
            GymError: ``MODEL_INVALID`` for a missing file.
        """

    @abstractmethod
    def require_header(self, source: Path) -> None:
        """Reject a source that is not a model of this format by its first bytes, before hashing gigabytes.

        Raises:
            GymError: ``UNAVAILABLE``, and errors of ``bytes_needed``.
        """

    @abstractmethod
    def bytes_needed(self, source: Path) -> int:
        """Return the size of the result in bytes, before anything is written.

        Raises:
            GymError: ``MODEL_INVALID`` for an unreadable source; ``MISSING_DEPENDENCY``.
        """

    @abstractmethod
    def describe(self, source: Path) -> str:
        """Describe the conversion, such as ``GGUF q8_0, which becomes float16``."""

    @abstractmethod
    def write(self, source: Path, folder: Path, report: Report) -> None:
        """Write the model folder into the empty ``folder``.

        Raises:
            GymError: Errors from ``bytes_needed``.
        """
