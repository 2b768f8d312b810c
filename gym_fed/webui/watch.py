"""Live updates of runs: a thread reads the files of runs on open pages and publishes changes.

Without open pages the thread sleeps; otherwise it reads only what pages have requested recently.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.web.events import Feed, PageEvent
from gym_fed.webui.curves import CurvesOfRuns, last_values
from gym_fed.webui.jobs import Jobs, WebJob
from gym_fed.webui.plain import text
from gym_fed.webui.run_detail import RunList, job_of, marks_of, series_of, status_of

INTEREST_SECONDS = 600.0
"""How long a run is watched after a page last requested it; open pages request it more often."""
_LOOK_SECONDS = 1.0
_MAX_WATCHED = 64
_LIST = ""
"""Represents the list of runs among the watched paths."""

_log = logging.getLogger(__name__)


class RunWatch:
    """Publishes ``run`` for changed runs, ``runs`` for changed lines of the list, and ``job`` for changed jobs.

    Args:
        root: Folder of runs.
        feed: Feed for the events.
        curves: Reader of the runs' curves.
        runs: List of runs.
        jobs: Jobs, whose status changes are also published.
    """

    def __init__(self, root: Path, feed: Feed, curves: CurvesOfRuns, runs: RunList, jobs: Jobs) -> None:
        self._root, self._feed, self._curves, self._runs, self._jobs = root, feed, curves, runs, jobs
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
            self._publish_run(path, job_of(self._root / path, jobs))

    def _publish_list(self) -> None:
        lines = {line["path"]: line for line in self._runs.lines()}
        before = self._seen.get(_LIST)
        self._seen[_LIST] = lines
        if before is None:
            return
        changed = [line for path, line in lines.items() if before.get(path) != line]
        gone = [path for path in before if path not in lines]
        if changed or gone:
            self._feed.publish(PageEvent("runs", {"changed": changed[:100], "gone": gone[:100]}))

    def _publish_run(self, path: str, job: WebJob | None) -> None:
        folder = self._root / path
        if not (folder / "run.json").is_file():
            return
        curves = self._curves.of(folder)
        line = self._runs.line(folder)
        status = status_of(line, job)
        now = (curves.version, curves.restarts, status)
        before = self._seen.get(path)
        self._seen[path] = (now, curves.last_step)
        if before is None or before[0] == now:
            return
        since = before[1] if before[0][1] == curves.restarts else None
        news = {
            "path": text(path),
            "since": since,
            "status": status,
            "steps": line["steps"],
            "figures": {**line["figures"], **last_values(curves.series)},
            "marks": marks_of(folder),
            "series": series_of(curves, since=since),
        }
        self._feed.publish(PageEvent("run", news))
