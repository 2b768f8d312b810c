"""What a format must say and do to be read: ``Importer``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

Report = Callable[[int, int], None]
"""Receives the bytes that were written, and all that are to be."""


class Importer(ABC):
    """Reads one format."""

    name: ClassVar[str]
    """As users call the format."""

    version: ClassVar[int]
    """Raised when the same source becomes another folder; what an earlier version made is made again."""

    @abstractmethod
    def takes(self, source: Path) -> bool:
        """Whether a file or folder that exists is of this format; cheap, for every command calls it."""

    @abstractmethod
    def files(self, source: Path) -> list[Path]:
        """The files that the result depends on, in an order that is the same everywhere.

        Raises:
            GymError: ``MODEL_INVALID`` for one that is missing.
        """

    @abstractmethod
    def require_header(self, source: Path) -> None:
        """Refuse what its first bytes show to be no model of this format; called before gigabytes are hashed.

        Raises:
            GymError: As ``bytes_needed``, and ``UNAVAILABLE``.
        """

    @abstractmethod
    def bytes_needed(self, source: Path) -> int:
        """Size of the result, before anything is written.

        Raises:
            GymError: ``MODEL_INVALID`` for a source that cannot be read; ``MISSING_DEPENDENCY``.
        """

    @abstractmethod
    def describe(self, source: Path) -> str:
        """What is said about it once, such as ``GGUF q8_0, which becomes float16``."""

    @abstractmethod
    def write(self, source: Path, folder: Path, report: Report) -> None:
        """Fill the empty ``folder`` with a model folder.

        Raises:
            GymError: As ``bytes_needed``.
        """
