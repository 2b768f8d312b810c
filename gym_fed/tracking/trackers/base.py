"""The base class of trackers, which log a run's config, figures and files."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.core.errors import ErrorCode, GymError


@dataclass(frozen=True)
class RunInfo:
    """Which run it is.

    Attributes:
        folder: The run folder; what a tracker writes goes below it.
        project: What the run belongs to.
        name: The run's own name.
        tags: Free words.
        online: Whether a service may be talked to; otherwise everything stays in ``folder``.
        uri: The service's address, where it is not the package's own.
        from_step: Figures of later steps, from before an interruption, no longer count; None for a run that appends.
    """

    folder: Path
    project: str
    name: str
    tags: tuple[str, ...] = ()
    online: bool = False
    uri: str | None = None
    from_step: int | None = None


class Tracker(ABC):
    """Opened once, logs in order of steps, closed once."""

    package: ClassVar[str | None] = None
    """What must be installed (extra ``track``)."""

    def check(self) -> None:
        """Refuse before anything is written.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` naming the extra.
        """
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"tracking: {self.package} is not installed",
                "pip install 'gym-fed[track]'",
            )

    @abstractmethod
    def open(self, run: RunInfo) -> None:
        """Begin or continue the run."""

    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - not everybody keeps it
        """The run's settings, nested."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Finite figures of one step."""

    def log_artifacts(self, paths: Sequence[Path]) -> None:  # noqa: B027 - not everybody keeps them
        """Files and folders that the run gave."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still in memory."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"lora": {"r": 4}}`` to ``{"lora.r": 4}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
