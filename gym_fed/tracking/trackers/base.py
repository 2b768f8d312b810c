"""The base class of trackers, which log a run's config, metrics and files."""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gym_fed.core.errors import ErrorCode, GymError


@dataclass(frozen=True)
class RunInfo:
    """Identifies a run for its trackers.

    Attributes:
        folder: The run folder; trackers write only below it.
        name: The run's own name.
        tags: Free-form tags.
        online: True if connections to a service are allowed; otherwise everything stays in ``folder``.
        uri: The service's address; by default the package's own.
        from_step: Step after which earlier entries, from before an interruption, are dropped; None to append.
    """

    folder: Path
    project: str
    name: str
    tags: tuple[str, ...] = ()
    online: bool = False
    uri: str | None = None
    from_step: int | None = None


class Tracker(ABC):
    """The base class of trackers, which are opened once, called in order of steps, and closed once."""

    package: ClassVar[str | None] = None
    """The required package (extra ``track``)."""

    def check(self) -> None:
        """Raise if the tracker cannot run, before anything is written.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` naming the extra.
        """
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            reason = f"tracking: {self.package} is not installed"
            raise GymError(ErrorCode.MISSING_DEPENDENCY, reason, "pip install 'gym-fed[track]'")

    @abstractmethod
    def open(self, run: RunInfo) -> None:
        """Start or continue the run."""

    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Log the run's settings, nested."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log finite metrics of one step."""

    def log_artifacts(self, paths: Sequence[Path]) -> None:  # noqa: B027 - optional
        """Log files and folders of the run."""

    @abstractmethod
    def close(self) -> None:
        """Flush what is still in memory."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten ``{"lora": {"r": 4}}`` to ``{"lora.r": 4}``."""
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flattened.update(flat(value, f"{prefix}{key}."))
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSONL file; a truncated last line is skipped."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
