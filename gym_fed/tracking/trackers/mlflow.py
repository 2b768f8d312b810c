"""Log to MLflow. Offline by default: an SQLite file in the run folder for `mlflow ui --backend-store-uri`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gym_fed.tracking.trackers.base import RunInfo, Tracker, flat

_LONGEST_VALUE = 6000  # MLflow's limit for a parameter
_MAX_METRICS = 1000  # MLflow's limit for one call


class MLflow(Tracker):
    """One run in the experiment ``project``; a resumed run is found by its folder."""

    package = "mlflow"

    def open(self, run: RunInfo) -> None:
        from mlflow.entities import RunStatus
        from mlflow.tracking import MlflowClient

        run.folder.mkdir(parents=True, exist_ok=True)
        folder = run.folder.resolve() / "mlflow"
        if not run.online:
            folder.mkdir(exist_ok=True)
        uri = run.uri if run.online else f"sqlite:///{folder / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            place = None if run.online else (folder / "artifacts").as_uri()
            number = self._client.create_experiment(run.project, artifact_location=place)
        else:
            number = experiment.experiment_id
        here = str(run.folder.resolve())
        runs = self._client.search_runs([number], f"tags.gym_folder = '{here}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.set_terminated(self._id, RunStatus.to_string(RunStatus.RUNNING))
        else:
            tags = {"gym_folder": here, **{tag: "" for tag in run.tags}}
            self._id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        self._continued = bool(runs)
        self._known: dict[str, set[tuple[int, float]]] = {}

    def log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        values = {key: str(value)[:_LONGEST_VALUE] for key, value in flat(config).items()}
        # MLflow refuses to change a parameter.
        params = [Param(key, value) for key, value in values.items() if key not in known]
        self._client.log_batch(self._id, params=params)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        points = [
            Metric(key, value, now, step)
            for key, value in ((_allowed(key), value) for key, value in metrics.items())
            if (step, value) not in self._logged_before(key)
        ]
        for start in range(0, len(points), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=points[start : start + _MAX_METRICS])

    def log_artifacts(self, paths: Sequence[Path]) -> None:
        for path in paths:
            send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            send(self._id, str(path), path.name if path.is_dir() else None)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _logged_before(self, key: str) -> set[tuple[int, float]]:
        """Return the steps logged before an interruption. MLflow deletes nothing, so repeated steps are not logged
        again."""
        if not self._continued:
            return set()
        if key not in self._known:
            history = self._client.get_metric_history(self._id, key)
            self._known[key] = {(point.step, point.value) for point in history}
        return self._known[key]


def _allowed(key: str) -> str:
    """Replace characters that MLflow does not allow in names: all but letters, digits and ``_-. :/``."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in key)
