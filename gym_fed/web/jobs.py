"""Run jobs: detached `gym` processes that outlive their page and the workbench.

Each job has a folder with ``job.json`` (the command, and the process by id and start time, since ids are reused),
``output.txt`` and, after it has ended, ``status.json``. A workbench that is started later finds the jobs there. The
process is ``python -m gym_fed.web.jobs``, which runs the command and records its exit code.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
from fastapi import APIRouter, Query

from gym_fed.core.child_process import module_command, run_process, start_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.json_files import read_object
from gym_fed.core.portable import SIGKILL
from gym_fed.web.app import Changing, Looking

PROGRAMS = {
    "gym": "gym_fed.cli.main",
    "gym-client": "gym_client.cli.main",
    "gym-server": "gym_server.cli.main",
}
"""The module to run, by the first word of a job's command; jobs never use a shell."""
MAX_OUTPUT_BYTES = 64 * 2**10
"""Maximum number of output bytes per response; pages request the next part by its offset."""
_LAST_LINE_BYTES = 2000
MAX_LISTED = 500
_START_TOLERANCE_SECONDS = 2.0
"""Tolerance for process start times in seconds; process ids are reused only much later."""
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, SIGKILL)
"""Signals of the first, second and third stop; `gym train` writes a checkpoint after the first."""


def json_of(command: Sequence[str], folder: Path, seconds: float) -> Any:
    """Run a command without a job, wait for it, and return the JSON that it prints with ``--json``.

    Args:
        command: The program, a key of ``PROGRAMS``, and its arguments without ``--json``.
        folder: The working folder.
        seconds: The time limit.

    Raises:
        GymError: The command's own error; ``DEADLINE_EXCEEDED``; ``INTERNAL`` if it prints no JSON.
    """
    name = " ".join(word for word in command if not Path(word).is_absolute())
    try:
        result = run_process(
            module_command(PROGRAMS[command[0]], *command[1:], "--json"),
            cwd=folder,
            passphrases=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise GymError(
            ErrorCode.DEADLINE_EXCEEDED,
            f"{name} took more than {seconds:g} s",
            f"run it in a terminal: {name}",
        ) from error
    refusal = GymError.last_in(result.stderr) if result.returncode else None
    if refusal is not None:
        raise refusal
    failure = GymError(ErrorCode.INTERNAL, f"{name} ended with code {result.returncode}")
    if result.returncode:
        raise failure
    try:
        return json.loads(result.stdout)
    except (ValueError, RecursionError) as error:
        raise failure from error


def main(folder: Path, module: str, words: list[str]) -> None:
    """Wait for the end of standard input, then run ``python -m MODULE WORDS`` as a job if ``job.json`` exists.

    Signals reach the whole group: the command handles them, and this process survives to write the status.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, a handler is not inherited by the command
    sys.stdin.buffer.read()
    if not (folder / "job.json").exists():
        return
    with (folder / "output.txt").open("ab", buffering=0) as output:
        ended = run_process(
            module_command(module, *words), passphrases=True, stdout=output, stderr=subprocess.STDOUT
        )
    status = {"exit_code": ended.returncode, "ended_at": time.time()}
    write_atomically(folder / "status.json", json.dumps(status).encode())


@dataclass(frozen=True)
class WebJob:
    """A command started from a page.

    Attributes:
        id: Job id, valid as a folder name.
        title: Title for display.
        command: Command line, starting with ``gym``.
        folder: Folder that it works on, such as that of a run; may be empty.
        pid: Id of the process that leads its process group.
        process_started_at: Start time of that process in seconds since boot, which identifies it if ids are reused.
        started_at: Start time in Unix seconds.
        status: ``running``, ``ended``, or ``killed`` if there is no exit code.
        exit_code: Exit code of an ended job; if negative, the number of the signal that ended it.
        ended_at: End time in Unix seconds; None if unknown.
        stops: Number of stop requests.
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
        """Return the job's properties for pages."""
        return asdict(self)


class Jobs:
    """The jobs in one folder. Safe from any thread.

    Args:
        folder: Folder with the jobs' folders.
        working_folder: Working directory of the commands; None for that of this process.
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
        """Start a `gym` command that outlives this process.

        Args:
            command: Command line, such as ``["gym", "train", "run.yaml"]``.
            title: Title for display.
            folder: Folder that the job works on.
            env: Additional environment variables, which are not written to a file.

        Raises:
            GymError: ``USAGE`` for a program other than gym-fed's.
        """
        if not command or command[0] not in PROGRAMS or any("\x00" in word for word in command):
            raise GymError(ErrorCode.USAGE, f"a job runs {', '.join(PROGRAMS)}, not {list(command)[:1]}")
        now = time.time()
        id = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(4)}"
        place = self.folder / id
        make_folder(place)
        # The wrapper waits for this pipe to close and then requires job.json, so a workbench killed here starts
        # nothing.
        process = start_process(
            module_command("gym_fed.web.jobs", place, PROGRAMS[command[0]], *command[1:]),
            passphrases=True,
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
        """List the newest ``MAX_LISTED`` jobs, newest first."""
        if not self.folder.is_dir():
            return []
        names = sorted((name for name in os.listdir(self.folder) if _ID.fullmatch(name)), reverse=True)
        self._ended = {name: self._ended[name] for name in names if name in self._ended}
        jobs = []
        for name in names[:MAX_LISTED]:
            try:
                jobs.append(self.get(name))
            except GymError:  # skip unreadable jobs
                continue
        return jobs

    def get(self, id: str) -> WebJob:
        """Return a job.

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
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{place / 'job.json'} is not a valid job file"
            ) from error
        job = replace(begun, stops=self._stops(place))
        is_running = self._is_running(job)  # checked before the status, which the wrapper writes last
        try:
            ended = read_object(place / "status.json", ErrorCode.STATE_CORRUPT)
        except FileNotFoundError:
            if is_running:
                return job
            ended_job = replace(job, status="killed")
        else:
            ended_job = replace(
                job, status="ended", exit_code=ended.get("exit_code"), ended_at=ended.get("ended_at")
            )
        self._ended[id] = ended_job  # final, and cached because jobs are listed often
        return ended_job

    def stop(self, id: str) -> WebJob:
        """Interrupt a job like Ctrl-C, so that a run writes a checkpoint.

        The second call terminates it, and the third kills it.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        job = self.get(id)
        if job.status != "running":
            return job
        place = self._place(id)
        number = _SIGNALS[min(job.stops, len(_SIGNALS) - 1)]
        write_atomically(place / "stops.json", json.dumps({"stops": job.stops + 1}).encode())
        with suppress(ProcessLookupError):  # the process has just ended
            _signal_group(job.pid, number)
        return self.get(id)

    def output(self, id: str, offset: int = 0) -> dict[str, Any]:
        """Return a part of a job's output.

        Returns:
            The dict ``{text, offset, next, size}`` in bytes of the file; a negative ``offset`` counts from the end.

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
        complete = data[: len(data) - _torn_bytes(data)] or data
        return {
            "text": complete.decode("utf-8", errors="replace"),
            "offset": start,
            "next": start + len(complete),
            "size": size,
        }

    def last_line(self, id: str) -> str:
        """Return the last line that a job has printed; empty if there is none."""
        lines = self.output(id, -_LAST_LINE_BYTES)["text"].rstrip().splitlines()
        return lines[-1].strip() if lines else ""

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
        with self._lock:  # reap children: an ended process stays a zombie until its parent polls it
            self._children = [child for child in self._children if child.poll() is None]
        try:
            process = psutil.Process(job.pid)
            is_same = abs(_seconds_after_boot(process) - job.process_started_at) < _START_TOLERANCE_SECONDS
            has_restarted = psutil.boot_time() > job.started_at + _START_TOLERANCE_SECONDS
            return is_same and not has_restarted and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def job_routes(jobs: Jobs) -> APIRouter:
    """Create the routes below ``/jobs``."""
    router = APIRouter()

    @router.get("/jobs")
    def listed(visitor: Looking) -> dict[str, Any]:
        """List the newest jobs."""
        every = jobs.list()
        return {"jobs": [job.facts() for job in every], "total": len(every)}

    @router.get("/jobs/{id}")
    def one(id: str, visitor: Looking) -> dict[str, Any]:
        """Describe a job."""
        return jobs.get(id).facts()

    @router.get("/jobs/{id}/output")
    def output(
        id: str, visitor: Looking, offset: Annotated[int, Query(ge=-(2**40), le=2**40)] = 0
    ) -> dict[str, Any]:
        """Return a job's output from a byte offset."""
        return jobs.output(id, offset)

    @router.post("/jobs/{id}/stop")
    def stop(id: str, visitor: Changing) -> dict[str, Any]:
        """Interrupt a job; a second call terminates it, and a third kills it."""
        return jobs.stop(id).facts()

    return router


def _seconds_after_boot(process: psutil.Process) -> float:
    """Return a process's start time relative to boot, which is independent of changes to the clock."""
    return process.create_time() - psutil.boot_time()


def _torn_bytes(data: bytes) -> int:
    """Return the number of bytes at the end that belong to an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return back if needed > back else 0
    return 0


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group; on Windows, which has no groups, terminate the process and its children."""
    if hasattr(os, "killpg"):
        os.killpg(pid, number)
        return
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (*leader.children(recursive=True), leader):
            process.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
