"""Record a run's config, metrics and files in every tracker."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsFloat

from pydantic import BaseModel

from gym_fed.config.train.run import ALWAYS
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import TRACKERS
from gym_fed.tracking.trackers.base import RunInfo, Tracker


class Experiment:
    """A tracked run. Use as a context manager, or ``close`` it.

    ::

        with Experiment("runs/mine", trackers=["jsonl", "tensorboard", "wandb"]) as experiment:
            experiment.log_config({"learning_rate": 1e-3})
            experiment.log_metrics({"loss": 0.5}, step=1)
            experiment.log_artifacts([Path("model.safetensors")])

    Args:
        folder: The run folder (a bare name means ``runs/NAME``); created with the first entry.
        trackers: Names in ``gym_fed.core.registries.TRACKERS``; ``jsonl`` and ``tensorboard`` are always registered.
        project: The run's project, for trackers with projects.
        name: The run's name in the trackers; by default the folder's name.
        tags: Free-form tags, for trackers that support them.
        mode: ``online`` allows connections to a service; ``offline`` keeps everything in the folder.
        uri: Address of the service; by default the package's own.
        from_step: Continue after this step, and drop the entries of later steps. None appends.
        active: If False, log nothing, for processes other than the main one.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` or ``CONFIG_INVALID``, before anything is written.
    """

    def __init__(
        self,
        folder: str | Path,
        trackers: Sequence[str] = ALWAYS,
        *,
        project: str = "gym-fed",
        name: str | None = None,
        tags: Sequence[str] = (),
        mode: str = "offline",
        uri: str | None = None,
        from_step: int | None = None,
        active: bool = True,
    ) -> None:
        if mode not in ("offline", "online"):
            raise GymError(ErrorCode.CONFIG_INVALID, f"mode: {mode!r} is neither offline nor online")
        path = Path(folder)
        if isinstance(folder, str) and path.name == folder:
            path = Path("runs") / folder
        self.folder = path
        self._trackers: list[Tracker] = [
            ready_tracker(t) for t in dict.fromkeys((*ALWAYS, *trackers)) if active
        ]
        self._run = RunInfo(path, project, name or path.name, tuple(tags), mode == "online", uri, from_step)
        self._open = False
        self._closed = False
        self._step = from_step or 0

    def log_config(self, config: Mapping[str, Any] | BaseModel) -> None:
        """Log the run's settings; values that are not plain are logged as their text."""
        values = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
        values = json.loads(json.dumps(values, default=str))
        for tracker in self._opened():
            tracker.log_config(values)

    def log_metrics(self, metrics: Mapping[str, SupportsFloat], step: int | None = None) -> None:
        """Log metrics of one step; non-finite values are skipped, since trackers cannot plot them.

        Args:
            metrics: Values by name: numbers, or scalars of numpy or torch.
            step: Step number, from 1; by default one more than in the last call.

        Raises:
            GymError: ``USAGE`` naming a value that is not a number, before anything is logged.
        """
        step = self._step + 1 if step is None else step
        figures = {key: _figure(key, value) for key, value in metrics.items()}
        finite = {key: value for key, value in figures.items() if math.isfinite(value)}
        self._step = step
        if finite:
            for tracker in self._opened():
                tracker.log_metrics(finite, step)

    def log_artifacts(self, paths: Sequence[str | Path]) -> None:
        """Log files or folders of the run.

        Raises:
            GymError: ``FILE_NOT_FOUND``, before anything is logged.
        """
        files = [Path(path) for path in paths]
        missing = [path for path in files if not path.exists()]
        if missing:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"artifact {missing[0]} does not exist")
        for tracker in self._opened():
            tracker.log_artifacts(files)

    def close(self) -> None:
        """Flush and close the trackers; idempotent."""
        if self._open and not self._closed:
            for tracker in self._trackers:
                tracker.close()
        self._closed = True

    def __enter__(self) -> Experiment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> list[Tracker]:
        if self._closed:
            raise GymError(ErrorCode.USAGE, "the experiment is closed")
        if not self._open:
            for tracker in self._trackers:
                tracker.open(self._run)
            self._open = True
        return self._trackers


def ready_tracker(name: str) -> Tracker:
    """Create a tracker after checking that its package is installed.

    Raises:
        GymError: ``CONFIG_INVALID`` for an unknown tracker; ``MISSING_DEPENDENCY`` without its package.
    """
    tracker: Tracker = TRACKERS.type_of(name)()
    tracker.check()
    return tracker


def _figure(key: str, value: Any) -> float:
    """Convert to a plain number; integers stay integers."""
    if not isinstance(value, float):
        try:
            return int(operator.index(value))
        except TypeError:
            pass  # not a whole number
    try:
        if not isinstance(value, str | bytes):  # text is not a figure, even if it looks like one
            return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        pass  # reported below
    raise GymError(
        ErrorCode.USAGE, f"metric {key!r} is {type(value).__name__}, not one number", "log a float or an int"
    )
