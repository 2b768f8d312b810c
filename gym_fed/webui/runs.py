"""The ``runs`` and ``run`` screens: a list, curves of one or several runs, stop and resume, and live updates.

For live updates, a thread reads the files of runs that pages have requested recently, and publishes changes. It sleeps
while no page is open.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
from fastapi import APIRouter, Query
from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.yaml.strict import read_run_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.training.run.folder import LOCK_FILE, is_held
from gym_fed.training.run.result import read_json
from gym_fed.web.access import Role
from gym_fed.web.app import Changing, Looking
from gym_fed.web.events import Feed, PageEvent
from gym_fed.web.jobs import Jobs, WebJob
from gym_fed.webui.curves import CurvesOfRuns, last_values
from gym_fed.webui.run_detail import (
    RunList,
    config_text,
    detail,
    is_at_work,
    job_of,
    marks_of,
    phase_of,
    series_of,
    status_of,
)
from gym_fed.webui.run_places import MAX_PATH, RunPlaces
from gym_fed.webui.workbench import MAX_ROWS, Workbench, text

_ENDING_SECONDS = 10.0

MAX_COMPARED = 5
"""Maximum number of runs to compare with the first; charts have six line styles."""

Range = Annotated[float | None, Query(ge=-1e15, le=1e15)]


INTEREST_SECONDS = 600.0
"""Seconds for which a run is watched after a page's last request; open pages request it more often."""


_LOOK_SECONDS = 1.0


_MAX_WATCHED = 64


_LIST = ""
"""The watched path that stands for the list of runs."""


_log = logging.getLogger(__name__)


class RunWatch:
    """Publishes ``run`` for changed runs, ``runs`` for changed lines of the list, and ``job`` for changed jobs.

    Args:
        places: Folders of runs.
        feed: Feed for the events.
        curves: Reader of the runs' curves.
        runs: List of runs.
        jobs: Jobs, whose status changes are also published.
    """

    def __init__(
        self, places: RunPlaces, feed: Feed, curves: CurvesOfRuns, runs: RunList, jobs: Jobs
    ) -> None:
        self._places, self._feed, self._curves, self._runs, self._jobs = places, feed, curves, runs, jobs
        self._asked: dict[str, float] = {}
        self._seen: dict[str, Any] = {}
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def look_at(self, path: str | None) -> None:
        """Watch this run, or the list of runs (None). The first call starts the thread."""
        with self._lock:
            self._asked[_LIST if path is None else path] = time.monotonic()
            while len(self._asked) > _MAX_WATCHED:
                self._asked.pop(min(self._asked, key=lambda path_seen: self._asked[path_seen]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="webui-watch", daemon=True)
                self._thread.start()
        self._wake.set()

    def _watch(self) -> None:
        while True:
            self._feed.has_readers.wait()
            self._wake.wait()
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                oldest = time.monotonic() - INTEREST_SECONDS
                self._asked = {path: at for path, at in self._asked.items() if at > oldest}
                asked = list(self._asked)
                if not asked:
                    self._wake.clear()
            self._seen = {key: seen for key, seen in self._seen.items() if key in (*asked, "jobs")}
            try:
                self.publish(asked)
            except (GymError, OSError, ValueError, TypeError):  # an invalid folder must not end the thread
                _log.exception("watching the runs failed")

    def publish(self, asked: list[str]) -> None:
        """Check these paths once and publish the changes."""
        jobs = self._jobs.list()
        now = {job.id: job.status for job in jobs}
        before = self._seen.get("jobs", now)
        self._seen["jobs"] = now
        for job in jobs:
            if before.get(job.id) != job.status:
                self._feed.publish(PageEvent("job", job.facts()))
        for path in asked:
            if path == _LIST:
                self._publish_list()
                continue
            self._publish_run(path, jobs)

    def _publish_list(self) -> None:
        lines = {line["path"]: line for line in self._runs.lines()}
        before = self._seen.get(_LIST)
        self._seen[_LIST] = lines
        if before is None:
            return
        changed = {path: line for path, line in lines.items() if before.get(path) != line}
        gone = [path for path in before if path not in lines]
        shared = {path for path in (*changed, *gone) if self._places.is_shared(path)}
        for private in (False, True):
            news = {
                "changed": [line for path, line in changed.items() if (path in shared) != private][:100],
                "gone": [path for path in gone if (path in shared) != private][:100],
            }
            if any(news.values()):
                self._feed.publish(PageEvent("runs", news, for_operators=private))

    def _publish_run(self, path: str, jobs: list[WebJob]) -> None:
        folder = self._places.folder_of(path)
        job = job_of(folder, jobs)
        if not (folder / "run.json").is_file():
            return
        curves = self._curves.of(folder)
        line = self._runs.line(folder)
        status = status_of(line, job)
        phase = phase_of(job, self._jobs)
        now = (curves.version, curves.restarts, status, phase)
        before = self._seen.get(path)
        self._seen[path] = (now, curves.last_step)
        if before is None or before[0] == now:
            return
        since = before[1] if before[0][1] == curves.restarts else None
        news = {
            "path": text(path),
            "since": since,
            "status": status,
            "phase": phase,
            "steps": line["steps"],
            "figures": {**line["figures"], **last_values(curves.series)},
            "marks": marks_of(folder),
            "series": series_of(curves, since=since),
        }
        self._feed.publish(PageEvent("run", news, for_operators=not self._places.is_shared(path)))


class _AddedRun(StrictModel):
    folder: str = Field(min_length=1, max_length=MAX_PATH)


def routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/runs``."""
    router, jobs, curves = APIRouter(), workbench.jobs, CurvesOfRuns()
    places = RunPlaces(workbench)
    every = RunList(places, curves)
    watch = RunWatch(places, workbench.feed, curves, every, jobs)

    @router.get("/runs")
    def listing(
        visitor: Looking,
        search: Annotated[str, Query(max_length=200)] = "",
        offset: Annotated[int, Query(ge=0, le=10**6)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 200,
    ) -> dict[str, Any]:
        """Return a page of runs, newest first, and the jobs whose run has not started."""
        watch.look_at(None)
        words = search.lower().split()
        lines = [
            line
            for line in every.lines()
            if (visitor.role is Role.OPERATOR or places.is_shared(line["path"]))
            and all(word in f"{line['path']} {line['algorithm']} {line['model']}".lower() for word in words)
        ]
        waiting: dict[str, dict[str, Any]] = {}  # newest job of each run that has not started
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

    @router.post("/runs")
    def add(given: _AddedRun, visitor: Changing) -> dict[str, Any]:
        """Add a run from another folder of this machine; return its path."""
        return {"path": places.path_of(places.add(given.folder))}

    @router.get("/runs/{path:path}")
    def one(
        path: str,
        visitor: Looking,
        compared: Annotated[list[str] | None, Query(alias="with", max_length=MAX_COMPARED)] = None,
        since: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
        xmin: Range = None,
        xmax: Range = None,
    ) -> dict[str, Any]:
        """Return a run with its curves and those of compared runs, from a step on or within a range of steps."""
        operator = visitor.role is Role.OPERATOR
        folder = places.folder_of(path, operator=operator)
        watch.look_at(places.path_of(folder))
        job = job_of(folder, jobs.list())
        if not _is_run(folder) and job is not None:
            return {"path": text(path), "status": "waiting", "job": job.facts(), "series": {}, "others": []}
        _require_run(folder, path)
        own = curves.of(folder)
        if since is None:
            about = detail(folder, path, every.line(folder), curves)
            about["job"] = None if job is None else job.facts()
            about["status"] = status_of(about, job)
            about["phase"] = phase_of(job, jobs)
            about["base"] = workbench.named(folder)  # the model's name on the play screen
            about["is_saved"] &= any(root in folder.parents for root in (workbench.folder, workbench.runs))
            about["command"] = shlex.join(resume_command(workbench, folder)) if not about["why"] else ""
            if visitor.csrf:  # configs may contain comments that viewers should not see
                about["config"] = config_text(folder, jobs.list(), workbench)
        else:
            about = {"path": text(path), "since": since}
        others = []
        for name in dict.fromkeys(compared or []):
            other = places.folder_of(name, operator=operator)
            _require_run(other, name)
            shown = detail(other, name, every.line(other), curves)
            watch.look_at(places.path_of(other))
            shown["series"] = series_of(curves.of(other), since=since, low=xmin, high=xmax)
            others.append(shown)
        return {**about, "series": series_of(own, since=since, low=xmin, high=xmax), "others": others}

    @router.post("/runs/{path:path}/stop")
    def stop(path: str, visitor: Changing) -> dict[str, Any]:
        """Interrupt a run; return its job or process."""
        return stop_run(places.folder_of(path), jobs)

    @router.post("/runs/{path:path}/resume")
    def resume(path: str, visitor: Changing) -> dict[str, Any]:
        """Resume a run; return the job."""
        folder = places.folder_of(path)
        _require_run(folder, path)
        return resume_run(workbench, folder, path).facts()

    return router


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _require_run(folder: Path, path: str) -> None:
    if not _is_run(folder):
        raise GymError(ErrorCode.NOT_FOUND, f"there is no run at {text(path)}", "see the list of runs")


def _below(workbench: Workbench, folder: str) -> str:
    """Return a job's folder relative to the folder of runs; empty for other folders."""
    prefix = f"{workbench.runs}/"
    return text(folder[len(prefix) :]) if folder.startswith(prefix) else ""


def stop_run(folder: Path, jobs: Jobs) -> dict[str, Any]:
    """Interrupt a run like Ctrl-C: it finishes its step and writes a checkpoint.

    Raises:
        GymError: ``NOT_FOUND`` if no process executes the run; ``PERMISSION_DENIED`` if the process cannot be stopped.
    """
    job = job_of(folder, [job for job in jobs.list() if job.status == "running"])
    if job is not None:
        return {"job": jobs.stop(job.id).facts()}
    process = _holder(folder)
    if process is None:
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"{text(folder.name)}: no process on this machine is running it",
            "reload the page",
        )
    try:
        # With several processes, the parent is torch's launcher, which forwards Ctrl-C to all of them.
        leader = process.parent() if (_begun(folder).get("num_processes") or 1) != 1 else process
        os.kill((leader or process).pid, signal.SIGINT)
    except (psutil.Error, OSError) as error:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"process {process.pid} cannot be stopped: {error}",
            "stop it where it was started",
        ) from error
    return {"job": None, "pid": process.pid}


def resume_run(workbench: Workbench, folder: Path, path: str) -> WebJob:
    """Resume a stopped run as a job.

    Raises:
        GymError: ``STATE_LOCKED`` while it is running; ``FILE_EXISTS`` if it is finished; ``USAGE`` for more processes
            than this machine has cores.
    """
    if is_held(folder) or not _has_ended(folder, workbench.jobs):
        raise GymError(
            ErrorCode.STATE_LOCKED, f"{text(path)} is already running", "wait for it, or stop it first"
        )
    if (folder / "result.json").exists():
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{text(path)} is finished", "train a new run in another output_dir"
        )
    processes, cores = _begun(folder).get("num_processes"), os.cpu_count() or 1
    if isinstance(processes, int) and processes > cores:  # a stranger's run may name any number
        raise GymError(
            ErrorCode.USAGE,
            f"{text(path)} ran in {counted(processes, 'process')}, but this machine has {counted(cores, 'core')}",
            "resume it on a command line, with another --nproc",
        )
    command = resume_command(workbench, folder)
    return workbench.jobs.start(command, title=f"train {text(path)}", folder=folder)


def _has_ended(folder: Path, jobs: Jobs) -> bool:
    """Return True if no job is working on a run; wait up to 10 seconds for a job that is ending."""
    until = time.monotonic() + _ENDING_SECONDS
    while is_at_work(folder, jobs):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def resume_command(workbench: Workbench, folder: Path) -> list[str]:
    """Return the command ``gym train RUN/config.yaml`` with the options that the file lacks.

    Raises:
        GymError: See ``read_run_config``.
    """
    command = ["gym", "train", workbench.named(folder / "config.yaml")]
    output = str(read_run_config(folder).get("output_dir", ""))
    if (workbench.folder / output).resolve() != folder:  # the run was started in another folder
        command += ["--set", f"output_dir={json.dumps(str(folder))}"]
    processes, most = (
        _begun(folder).get("num_processes"),
        os.cpu_count() or 1,
    )  # a stranger's may name any number
    if isinstance(processes, int) and 1 < processes <= most:
        command += ["--nproc", str(processes)]
    return command


def _begun(folder: Path) -> dict[str, Any]:
    try:
        document = read_json(folder / "run.json")
    except GymError:
        return {}
    return document if isinstance(document, dict) else {}


def _holder(folder: Path) -> psutil.Process | None:
    """Return the process that has the folder's lock file open (a process id may have been reused), or None."""
    if not is_held(folder):
        return None
    lock = folder / LOCK_FILE
    try:
        process = psutil.Process(int(lock.read_text(encoding="ascii")[:20]))
        is_open = any(Path(file.path) == lock for file in process.open_files())
    except (OSError, ValueError, psutil.Error):
        return None
    return process if is_open else None
