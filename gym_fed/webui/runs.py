"""The screens ``runs`` and ``run``: the list, the curves of one or several, their stop and their continuation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web.app import Changing, Looking
from gym_fed.webui.curves import CurvesOfRuns
from gym_fed.webui.plain import text
from gym_fed.webui.run_actions import resume_command, resume_run, stop_run
from gym_fed.webui.run_detail import config_text, detail, job_of, series_of, status_of
from gym_fed.webui.run_list import RunList
from gym_fed.webui.watch import RunWatch
from gym_fed.webui.workbench import MAX_ROWS, Workbench

MAX_COMPARED = 5
"""Runs beside the first one: there are six dashes."""
_MAX_PATH = 1000

Range = Annotated[float | None, Query(ge=-1e15, le=1e15)]


def routes(workbench: Workbench) -> APIRouter:
    """``runs``, and each run below it by its path."""
    found, jobs, curves = APIRouter(), workbench.jobs, CurvesOfRuns()
    every = RunList(workbench.runs, curves)
    watch = RunWatch(workbench.runs, workbench.feed, curves, every, jobs)

    @found.get("/runs")
    def listing(
        visitor: Looking,
        search: Annotated[str, Query(max_length=200)] = "",
        offset: Annotated[int, Query(ge=0, le=10**6)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 200,
    ) -> dict[str, Any]:
        """A page of runs, the newest first, and the jobs whose run has not begun."""
        watch.look_at(None)
        words = search.lower().split()
        lines = [
            line
            for line in every.lines()
            if all(word in f"{line['path']} {line['algorithm']} {line['model']}".lower() for word in words)
        ]
        waiting: dict[str, dict[str, Any]] = {}  # the newest job of each run that has not begun
        for job in jobs.list():
            path = _below(workbench, job.folder)
            if path and not _is_run(workbench.runs / path):
                waiting.setdefault(path, {**job.facts(), "path": path, "changed": job.started_at})
        return {
            "root": text(workbench.runs),
            "runs": lines[offset : offset + limit],
            "total": len(lines),
            "waiting": list(waiting.values())[:20],
        }

    @found.get("/runs/{path:path}")
    def one(
        path: str,
        visitor: Looking,
        compared: Annotated[list[str] | None, Query(alias="with", max_length=MAX_COMPARED)] = None,
        since: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
        xmin: Range = None,
        xmax: Range = None,
    ) -> dict[str, Any]:
        """One run with its curves and those of others, from a step on or within a range of steps."""
        folder = _place(workbench, path)
        watch.look_at(folder.relative_to(workbench.runs).as_posix())
        job = job_of(folder, jobs.list())
        if not _is_run(folder) and job is not None:
            return {"path": text(path), "status": "waiting", "job": job.facts(), "series": {}, "others": []}
        _require_run(folder, path)
        own = curves.of(folder)
        if since is None:
            about = detail(folder, path, every.line(folder), curves)
            about["job"] = None if job is None else job.facts()
            about["status"] = status_of(about, job)
            about["base"] = workbench.named(folder)  # as `play` calls it
            about["command"] = shlex.join(resume_command(workbench, folder)) if not about["why"] else ""
            if visitor.csrf:  # comments in a config are for who may train
                about["config"] = config_text(folder, jobs.list(), workbench)
        else:
            about = {"path": text(path), "since": since}
        others = []
        for name in dict.fromkeys(compared or []):
            other = _place(workbench, name)
            _require_run(other, name)
            beside = detail(other, name, every.line(other), curves)
            watch.look_at(other.relative_to(workbench.runs).as_posix())
            beside["series"] = series_of(curves.of(other), since=since, low=xmin, high=xmax)
            others.append(beside)
        return {**about, "series": series_of(own, since=since, low=xmin, high=xmax), "others": others}

    @found.post("/runs/{path:path}/stop")
    def stop(path: str, visitor: Changing) -> dict[str, Any]:
        """Interrupt a run: the job, or the process."""
        return stop_run(_place(workbench, path), jobs)

    @found.post("/runs/{path:path}/resume")
    def resume(path: str, visitor: Changing) -> dict[str, Any]:
        """Continue a run: the job."""
        folder = _place(workbench, path)
        _require_run(folder, path)
        return resume_run(workbench, folder, path).facts()

    return found


def _place(workbench: Workbench, path: str) -> Path:
    """The folder that a page names.

    Raises:
        GymError: ``NOT_FOUND``; ``PERMISSION_DENIED`` for one that is not below the folder of runs.
    """
    if not path or len(path) > _MAX_PATH:
        raise GymError(ErrorCode.NOT_FOUND, "there is no such run", "see the list of runs")
    return workbench.inside(path, root=workbench.runs)


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _require_run(folder: Path, path: str) -> None:
    if not _is_run(folder):
        raise GymError(ErrorCode.NOT_FOUND, f"there is no run at {text(path)}", "see the list of runs")


def _below(workbench: Workbench, folder: str) -> str:
    """The path of a job's folder as pages name a run; empty for a job of something else."""
    prefix = f"{workbench.runs}/"
    return text(folder[len(prefix) :]) if folder.startswith(prefix) else ""
