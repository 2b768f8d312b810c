"""Log to Trackio, Hugging Face's local tracker. Offline by default: its database is in the run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.tracking.trackers.base import RunInfo, Tracker


class Trackio(Tracker):
    """A Trackio run for ``TRACKIO_DIR=RUN/trackio trackio show``; online, ``uri`` is its Space."""

    package = "trackio"

    def open(self, run: RunInfo) -> None:
        if not run.online:
            os.environ["TRACKIO_DIR"] = str((run.folder / "trackio").resolve())  # read on import
        import trackio

        self._trackio: Any = trackio
        self._run_arguments: dict[str, Any] = {"project": run.project, "name": run.name, "resume": "allow"}
        if run.online and run.uri is not None:
            self._run_arguments["space_id"] = run.uri
        self._config: dict[str, Any] = {}
        self._started = False

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if not self._started:  # Trackio takes the config only at the start
            self._trackio.init(config=self._config, **self._run_arguments)
            self._started = True
        self._trackio.log(dict(metrics), step=step)

    def log_artifacts(self, paths: Sequence[Path]) -> None:
        """Do nothing: Trackio keeps only metrics, and the files are in the run folder."""

    def close(self) -> None:
        if self._started:
            self._trackio.finish()
