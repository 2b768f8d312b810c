"""Prepare runs for display: a summary line, the details, and annotated curves."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core.errors import GymError
from gym_fed.core.files import lies_in
from gym_fed.tracking.trackers.base import flat
from gym_fed.training.run.folder import is_held
from gym_fed.training.run.result import listed, read_json
from gym_fed.web.jobs import Jobs, WebJob
from gym_fed.webui.curves import MAX_POINTS, CurvesOfRuns, RunCurves, last_values, thinned
from gym_fed.webui.run_places import RunPlaces
from gym_fed.webui.train_check import MAX_CHARACTERS
from gym_fed.webui.workbench import Workbench, plain, text

MAX_RUNS = 5000
"""Maximum number of runs to list, in the order of their paths."""
_SPARK_POINTS = 40
_STAMPED = ("config.yaml", "metrics.jsonl", "result.json", "run.json")

MAX_MARKS = 200
CONFIGS_NAME = ".configs"
"""Folder, below the runs, with the YAML of every run that was started from a page."""


def detail(folder: Path, path: str, line: dict[str, Any], curves: CurvesOfRuns) -> dict[str, Any]:
    """Return everything about a run except its curves.

    Args:
        folder: Folder of the run.
        path: Path of the run, relative to the folder of runs.
        line: Summary line of the run.
        curves: Reader of the runs' curves.

    """
    begun = _read(folder / "run.json") or {}
    result = _read(folder / "result.json") or {}
    try:
        config = read_run_config(folder) if lies_in(folder / "config.yaml", folder) else {}
    except GymError:
        config = {}
    return {
        **line,
        "path": text(path),
        "folder": text(folder),
        "total_steps": plain(config.get("max_steps")),
        "figures": {**line["figures"], **last_values(curves.of(folder).series)},
        "settings": plain(flat(config)),
        "environment": plain(_read(folder / "environment.json")),
        "rows": plain(begun.get("rows")) if isinstance(begun, dict) else None,
        "check": plain(result.get("check")) if isinstance(result, dict) else None,
        "marks": marks_of(folder),
        "is_thinned": is_thinned(curves.of(folder)),
        "is_adapter": (folder / "adapter_config.json").is_file(),
        "is_saved": any((folder / name).is_file() for name in ("config.json", "adapter_config.json")),
    }


def series_of(
    curves: RunCurves,
    *,
    since: int | None = None,
    low: float | None = None,
    high: float | None = None,
    most: int = MAX_POINTS,
) -> dict[str, Any]:
    """Return curves by name, each a list of ``[step, value]``."""
    return {
        text(name): curve.points(
            since=since,
            low=-math.inf if low is None else low,
            high=math.inf if high is None else high,
            most=most,
        )
        for name, curve in list(curves.series.items())
    }


def is_thinned(curves: RunCurves) -> bool:
    """Return True if any curve has more points than the full view shows."""
    return any(len(curve.steps) > MAX_POINTS for curve in curves.series.values())


def marks_of(folder: Path) -> list[dict[str, Any]]:
    """Return loss spikes and roll-backs, ordered by step: ``{step, kind, metric, value, usual, to_step}``."""
    marks = []
    for name, kind in (("spikes.json", "spike"), ("rollbacks.json", "rollback")):
        entries = _read(folder / name)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and type(entry.get("step")) is int:
                values = {key: entry.get(key) for key in ("step", "metric", "value", "usual", "to_step")}
                marks.append({"kind": kind, **plain(values)})
    return sorted(marks, key=lambda mark: (type(mark["step"]) is not int, mark["step"]))[-MAX_MARKS:]


def job_of(folder: Path, jobs: list[WebJob]) -> WebJob | None:
    """Return the newest job of a run; None if there is none."""
    return next((job for job in jobs if job.folder == str(folder)), None)


def is_at_work(folder: Path, jobs: Jobs) -> bool:
    """Return True if a job is working on a run."""
    return job_of(folder, [job for job in jobs.list() if job.status == "running"]) is not None


def config_text(folder: Path, jobs: list[WebJob], workbench: Workbench) -> str:
    """Return the YAML with which a page started the run; otherwise the config that the run wrote."""
    own = [job for job in jobs if job.folder == str(folder) and job.command[:2] == ["gym", "train"]]
    for name in [*(job.command[2] for job in own), str(folder / "config.yaml")]:
        file = workbench.folder / name
        if file.parent == workbench.runs / CONFIGS_NAME or file.parent == folder:
            with suppress(OSError):
                if file.is_file() and lies_in(file, file.parent) and file.stat().st_size <= MAX_CHARACTERS:
                    return file.read_text("utf-8", "replace")
    return ""


def status_of(line: dict[str, Any], job: WebJob | None) -> str:
    """Return a run's status, refined by the phase of its job, such as loading a model or saving a checkpoint."""
    if job is None or job.status != "running" or line["status"] not in ("unfinished", "running"):
        return str(line["status"])
    if job.stops:
        return "stopping"
    return "starting" if line["status"] == "unfinished" else "running"


def phase_of(job: WebJob | None, jobs: Jobs) -> str:
    """Return the last output line of a run's job, which says what it is doing; empty without a running job."""
    return "" if job is None or job.status != "running" else text(jobs.last_line(job.id))


def _read(file: Path) -> Any:
    """Read a file of a run; None if that fails, which the summary reports, or for a link to another folder."""
    try:
        return read_json(file) if lies_in(file, file.parent) else None
    except (GymError, OSError):
        return None


@dataclass
class _Known:
    stamp: tuple[Any, ...]
    line: dict[str, Any]


class RunList:
    """Summary lines of all runs, cached while their files do not change. Safe from any thread.

    Args:
        places: Folders of runs.
        curves: Reader of the runs' curves.
    """

    def __init__(self, places: RunPlaces, curves: CurvesOfRuns) -> None:
        self._places, self._curves = places, curves
        self._known: dict[Path, _Known] = {}
        self._lock = threading.Lock()

    def lines(self) -> list[dict[str, Any]]:
        """Return all runs, newest first: ``{path, status, algorithm, model, steps, figures, changed, spark}``."""
        with self._lock:
            lines = {folder: self._line(folder) for folder in islice(self._places.folders(), MAX_RUNS)}
            self._known = {folder: self._known[folder] for folder in lines}
        return sorted(lines.values(), key=lambda line: line["changed"], reverse=True)

    def line(self, folder: Path) -> dict[str, Any]:
        """Return the summary line of a run."""
        with self._lock:
            return self._line(folder)

    def _line(self, folder: Path) -> dict[str, Any]:
        stamp = (*(_stamp(folder / name) for name in _STAMPED), is_held(folder))
        known = self._known.get(folder)
        if known is None or known.stamp != stamp:
            known = self._known[folder] = _Known(stamp, self._read(folder))
        return known.line

    def _read(self, folder: Path) -> dict[str, Any]:
        line = listed(folder)
        losses = self._curves.of(folder).series.get("loss")
        points = [] if losses is None else list(zip(losses.steps, losses.values, strict=True))
        return {
            "path": self._places.path_of(folder),
            "status": line["status"],
            "why": text(line.get("why", "")),
            "algorithm": text(line["algorithm"]),
            "model": text(line["model"]),
            "steps": plain(line["steps"]),
            "figures": plain(line["figures"]),
            "changed": line["changed"],
            "spark": [value for _, value in thinned(points, _SPARK_POINTS) if value is not None],
        }


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
