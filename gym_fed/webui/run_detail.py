"""One run as a page shows it: its files as values, its curves, and what is marked in them."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.tracking.trackers.base import flat
from gym_fed.training.run.summary import read_config, read_json
from gym_fed.webui.curves import MAX_POINTS, CurvesOfRuns, RunCurves, last_values
from gym_fed.webui.jobs import Jobs, WebJob
from gym_fed.webui.plain import plain, text
from gym_fed.webui.train_check import MAX_CHARACTERS
from gym_fed.webui.workbench import Workbench

MAX_MARKS = 200
CONFIGS_NAME = ".configs"
"""Of the folder below that of runs where the YAML of every started run stays."""


def detail(folder: Path, path: str, line: dict[str, Any], curves: CurvesOfRuns) -> dict[str, Any]:
    """Everything about a run but its curves.

    Args:
        folder: Of the run.
        path: Below the folder of runs, as pages name it.
        line: Of the list of runs.
        curves: Where the curves of runs are read.

    """
    begun = _read(folder / "run.json") or {}
    try:
        config = read_config(folder)
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
        "marks": marks_of(folder),
        "is_thinned": is_thinned(curves.of(folder)),
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
    """Curves by name, each a list of ``[step, value]``."""
    return {
        text(name): one.points(
            since=since,
            low=-math.inf if low is None else low,
            high=math.inf if high is None else high,
            most=most,
        )
        for name, one in list(curves.series.items())
    }


def is_thinned(curves: RunCurves) -> bool:
    """Whether a part of the curves has more points than the whole shows."""
    return any(len(one.steps) > MAX_POINTS for one in curves.series.values())


def marks_of(folder: Path) -> list[dict[str, Any]]:
    """Spikes and roll-backs: ``{step, kind, metric, value, usual, to_step}``, by step."""
    found = []
    for name, kind in (("spikes.json", "spike"), ("rollbacks.json", "rollback")):
        entries = _read(folder / name)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and type(entry.get("step")) is int:
                kept = {key: entry.get(key) for key in ("step", "metric", "value", "usual", "to_step")}
                found.append({"kind": kind, **plain(kept)})
    return sorted(found, key=lambda mark: (type(mark["step"]) is not int, mark["step"]))[-MAX_MARKS:]


def job_of(folder: Path, jobs: list[WebJob]) -> WebJob | None:
    """The newest job that works on a run."""
    return next((job for job in jobs if job.folder == str(folder)), None)


def is_at_work(folder: Path, jobs: Jobs) -> bool:
    """Whether a job works on a run now."""
    return job_of(folder, [job for job in jobs.list() if job.status == "running"]) is not None


def config_text(folder: Path, jobs: list[WebJob], workbench: Workbench) -> str:
    """The YAML that a page started the run with, else the whole config that the run wrote."""
    own = [job for job in jobs if job.folder == str(folder) and job.command[:2] == ["gym", "train"]]
    for name in [*(job.command[2] for job in own), str(folder / "config.yaml")]:
        file = workbench.folder / name
        if file.parent == workbench.runs / CONFIGS_NAME or file.parent == folder:
            with suppress(OSError):
                if file.is_file() and file.stat().st_size <= MAX_CHARACTERS:
                    return file.read_text("utf-8", "replace")
    return ""


def status_of(line: dict[str, Any], job: WebJob | None) -> str:
    """A run's status, with what its job is about to do: it takes seconds to load a model, and to save a checkpoint."""
    if job is None or job.status != "running" or line["status"] not in ("unfinished", "running"):
        return str(line["status"])
    if job.stops:
        return "stopping"
    return "starting" if line["status"] == "unfinished" else "running"


def _read(file: Path) -> Any:
    """A file of a run; None where it cannot be read, which the summary reports."""
    try:
        return read_json(file)
    except (GymError, OSError):
        return None
