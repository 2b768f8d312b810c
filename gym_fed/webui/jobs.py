"""Jobs: commands of ours as detached processes, which a closed tab or a killed workbench leaves running.

Each has a folder with ``job.json`` (the command, and the process by number and start time, since numbers are used
again), ``output.txt`` and, when it has ended, ``status.json``. A workbench that is started later finds them there.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.json_files import read_object
from gym_fed.core.portable import SIGKILL

PROGRAMS = {
    "gym": "gym_fed.cli.main",
    "gym-client": "gym_client.cli.main",
    "gym-server": "gym_server.cli.main",
}
"""What a job may run, by the first word of its command. Never a shell."""
MAX_OUTPUT_BYTES = 64 * 2**10
"""Of one answer; pages ask for the next part by its offset."""
MAX_LISTED = 500
_START_TOLERANCE_SECONDS = 2.0
"""Numbers are used again after thousands of processes, later than this."""
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, SIGKILL)
"""Of the first, the second and the third stop: `gym train` leaves a checkpoint after the first."""


@dataclass(frozen=True)
class WebJob:
    """A command that was started from a page.

    Attributes:
        id: Safe as a name of a folder.
        title: For people.
        command: As it would be typed, ``gym`` first.
        folder: What it works on, such as the folder of a run; empty for nothing of the kind.
        pid: Of the process that leads its group.
        process_started_at: Seconds from the system's start to that process's, which no other of this number has.
        started_at: Unix seconds.
        status: ``running``, ``ended``, or ``killed`` where no exit code was left.
        exit_code: Of an ended one; below 0 it is the number of the signal that ended it.
        ended_at: Unix seconds; None where it is not known.
        stops: Times that it was asked to stop.
    """

    id: str
    title: str
    command: list[str]
    folder: str
    pid: int
    process_started_at: float
    started_at: float
    status: str = "running"
    exit_code: int | None = None
    ended_at: float | None = None
    stops: int = 0

    def facts(self) -> dict[str, Any]:
        """As pages get it."""
        return asdict(self)


class Jobs:
    """The jobs of one folder; from any thread.

    Args:
        folder: Where their folders are.
        working_folder: Where commands run; None for this process's own.
    """

    def __init__(self, folder: Path, working_folder: Path | None = None) -> None:
        self.folder = folder
        self._working_folder = working_folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._ended: dict[str, WebJob] = {}
        self._lock = threading.Lock()

    def start(
        self,
        command: Sequence[str],
        *,
        title: str,
        folder: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> WebJob:
        """Start a command of ours, which outlives this process.

        Args:
            command: ``["gym", "train", "run.yaml"]``.
            title: For people.
            folder: What it works on, shown with it.
            env: Variables beside this process's own; they are written nowhere.

        Raises:
            GymError: ``USAGE`` for a program that is not ours.
        """
        if not command or command[0] not in PROGRAMS or any("\x00" in word for word in command):
            raise GymError(ErrorCode.USAGE, f"a job runs {', '.join(PROGRAMS)}, not {list(command)[:1]}")
        now = time.time()
        id = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(4)}"
        place = self.folder / id
        make_folder(place)
        # The wrapper waits for the end of this pipe and for job.json: a workbench that is killed here starts nothing.
        process = subprocess.Popen(
            module_command("gym_fed.webui.job_process", place, PROGRAMS[command[0]], *command[1:]),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=self._working_folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        assert process.stdin is not None
        with process.stdin:
            job = WebJob(
                id=id,
                title=title,
                command=list(command),
                folder="" if folder is None else str(folder),
                pid=process.pid,
                process_started_at=_seconds_after_boot(psutil.Process(process.pid)),
                started_at=now,
            )
            write_atomically(place / "job.json", json.dumps(job.facts(), indent=1).encode())
        with self._lock:
            self._children.append(process)
        return job

    def list(self) -> list[WebJob]:
        """The newest ``MAX_LISTED`` jobs, the newest first."""
        if not self.folder.is_dir():
            return []
        names = sorted((name for name in os.listdir(self.folder) if _ID.fullmatch(name)), reverse=True)
        self._ended = {name: self._ended[name] for name in names if name in self._ended}
        found = []
        for name in names[:MAX_LISTED]:
            try:
                found.append(self.get(name))
            except GymError:  # one that cannot be read hides no others
                continue
        return found

    def get(self, id: str) -> WebJob:
        """One job.

        Raises:
            GymError: ``NOT_FOUND``; ``STATE_CORRUPT``.
        """
        if (known := self._ended.get(id)) is not None:
            return known
        place = self._place(id)
        try:
            begun = WebJob(**read_object(place / "job.json", ErrorCode.STATE_CORRUPT))
        except FileNotFoundError as error:
            raise GymError(ErrorCode.NOT_FOUND, f"there is no job {id}") from error
        except TypeError as error:
            raise GymError(ErrorCode.STATE_CORRUPT, f"{place / 'job.json'}: is not that of a job") from error
        job = replace(begun, stops=self._stops(place))
        is_running = self._is_running(job)  # before the status, which it writes last
        try:
            ended = read_object(place / "status.json", ErrorCode.STATE_CORRUPT)
        except FileNotFoundError:
            if is_running:
                return job
            found = replace(job, status="killed")
        else:
            found = replace(
                job, status="ended", exit_code=ended.get("exit_code"), ended_at=ended.get("ended_at")
            )
        self._ended[id] = found  # nothing changes any more, and lists are made often
        return found

    def stop(self, id: str) -> WebJob:
        """Interrupt a job as Ctrl-C does, so that a run leaves a checkpoint; the second time end it, the third kill it.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        job = self.get(id)
        if job.status != "running":
            return job
        place = self._place(id)
        number = _SIGNALS[min(job.stops, len(_SIGNALS) - 1)]
        write_atomically(place / "stops.json", json.dumps({"stops": job.stops + 1}).encode())
        with suppress(ProcessLookupError):  # it has just ended
            _signal_group(job.pid, number)
        return self.get(id)

    def output(self, id: str, offset: int = 0) -> dict[str, Any]:
        """A part of what a job has printed.

        Returns:
            ``{text, offset, next, size}`` in bytes of the file; a negative ``offset`` counts from the end.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        file = self._place(id) / "output.txt"
        if not file.exists():
            self.get(id)
            return {"text": "", "offset": 0, "next": 0, "size": 0}
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            stream.seek(start)
            data = stream.read(MAX_OUTPUT_BYTES)
        whole = data[: len(data) - _torn_bytes(data)] or data
        return {
            "text": whole.decode("utf-8", errors="replace"),
            "offset": start,
            "next": start + len(whole),
            "size": size,
        }

    def _place(self, id: str) -> Path:
        if not _ID.fullmatch(id):
            raise GymError(ErrorCode.NOT_FOUND, f"there is no job {id[:80]!r}")
        return self.folder / id

    def _stops(self, place: Path) -> int:
        try:
            return int(read_object(place / "stops.json", ErrorCode.STATE_CORRUPT)["stops"])
        except (OSError, GymError, KeyError, TypeError, ValueError):
            return 0

    def _is_running(self, job: WebJob) -> bool:
        with self._lock:  # what has ended is a zombie until its parent, which may be this process, has looked
            self._children = [child for child in self._children if child.poll() is None]
        try:
            process = psutil.Process(job.pid)
            is_same = abs(_seconds_after_boot(process) - job.process_started_at) < _START_TOLERANCE_SECONDS
            has_restarted = psutil.boot_time() > job.started_at + _START_TOLERANCE_SECONDS
            return is_same and not has_restarted and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def _seconds_after_boot(process: psutil.Process) -> float:
    """Start time of a process by a clock that nobody sets: a job is found again after the machine's was changed."""
    return process.create_time() - psutil.boot_time()


def _torn_bytes(data: bytes) -> int:
    """How many bytes at the end begin a character that the next part completes."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return back if needed > back else 0
    return 0


def _signal_group(pid: int, number: int) -> None:
    """Signal a process and its children; on Windows, which has no groups, they are ended whatever the number."""
    if hasattr(os, "killpg"):
        os.killpg(pid, number)
        return
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (*leader.children(recursive=True), leader):
            process.terminate()
