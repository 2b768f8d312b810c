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
        """True if an existing file or folder has this format; cheap, since every command calls it."""

    @abstractmethod
    def files(self, source: Path) -> list[Path]:
        """List the files that the result depends on, in a fixed order.

        Raises:
            GymError: ``MODEL_INVALID`` for one that is missing.
        """

    @abstractmethod
    def require_header(self, source: Path) -> None:
        """Refuse a source whose first bytes are not a model of this format, before gigabytes are hashed.

        Raises:
            GymError: As ``bytes_needed``, and ``UNAVAILABLE``.
        """

    @abstractmethod
    def bytes_needed(self, source: Path) -> int:
        """The size of the result, before anything is written.

        Raises:
            GymError: ``MODEL_INVALID`` for a source that cannot be read; ``MISSING_DEPENDENCY``.
        """

    @abstractmethod
    def describe(self, source: Path) -> str:
        """Describe the conversion, such as ``GGUF q8_0, which becomes float16``."""

    @abstractmethod
    def write(self, source: Path, folder: Path, report: Report) -> None:
        """Write the model folder into the empty ``folder``.

        Raises:
            GymError: As ``bytes_needed``.
        """
