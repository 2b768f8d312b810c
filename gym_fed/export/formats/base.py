"""What a format of an export is: how it is written, and how another process reads it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.config.delta import CodecPolicy
from gym_fed.export.source import Source


@dataclass(frozen=True)
class Options:
    """How it is written.

    Attributes:
        dtype: Type of the weights on disk; None keeps the source's.
        shard_size: Most bytes of one weights' file, as ``5GB``.
        codec: Of ``delta``.
    """

    dtype: str | None = None
    shard_size: str = "5GB"
    codec: CodecPolicy | None = None


class ExportFormat(ABC):
    """One format. Stateless."""

    tolerance: ClassVar[float] = 1e-5
    """How far a logit read back may be from the written one's, as a share of the largest logit."""

    merges: ClassVar[bool] = False
    """Whether adapters go into the weights."""

    is_file: ClassVar[bool] = False
    """Whether it is one file, not a folder."""

    tried: ClassVar[str] = ""
    """What the tests export with it; docs/support.md is generated from it."""

    untried: ClassVar[str] = ""
    """What it supports and no test has run."""

    reader: ClassVar[str] = "transformers"
    """Whose code reads it back."""

    def check(self, source: Source) -> None:  # noqa: B027 - most formats take every model
        """Refuse a model that this format cannot hold, before anything is written.

        Raises:
            GymError: ``USAGE`` naming the model, the reason and the remedy.
        """

    @abstractmethod
    def write(self, source: Source, target: Path, options: Options) -> None:
        """Write the file ``target``, or fill the new folder of that name."""

    @abstractmethod
    def expected(self, source: Source, target: Path, options: Options) -> Any:
        """The model in memory that what was written must compute the same as."""

    @abstractmethod
    def parts(self, source: Source, target: Path) -> dict[str, Any]:
        """What ``read_back`` loads: ``model`` (a folder), and ``adapters`` or ``delta`` to put on it, by path."""
