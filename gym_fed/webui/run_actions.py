"""Stopping a run, wherever it was started, and continuing one that was stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.folder_lock import LOCK_FILE, is_held
from gym_fed.training.run.summary import read_config, read_json
from gym_fed.webui.jobs import Jobs, WebJob
from gym_fed.webui.plain import text
from gym_fed.webui.run_detail import is_at_work, job_of
from gym_fed.webui.workbench import Workbench

_ENDING_SECONDS = 10.0


def stop_run(folder: Path, jobs: Jobs) -> dict[str, Any]:
    """Interrupt a run as Ctrl-C does: it ends after its step, with a checkpoint.

    Raises:
        GymError: ``NOT_FOUND`` where no process is at work that may be stopped.
    """
    job = job_of(folder, [job for job in jobs.list() if job.status == "running"])
    if job is not None:
        return {"job": jobs.stop(job.id).facts()}
    process = _holder(folder)
    if process is None:
        raise GymError(
            ErrorCode.NOT_FOUND, f"{text(folder.name)}: no process of this machine is at work in it", "reload"
        )
    try:
        # The first of several processes was started by torch's launcher, which passes Ctrl-C on to all of them.
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
    """Continue a run that was stopped, as a job.

    Raises:
        GymError: ``STATE_LOCKED`` while it runs; ``FILE_EXISTS`` when it is finished.
    """
    if is_held(folder) or not _has_ended(folder, workbench.jobs):
        raise GymError(ErrorCode.STATE_LOCKED, f"{text(path)}: runs already", "watch it, or stop it first")
    if (folder / "result.json").exists():
        raise GymError(
            ErrorCode.FILE_EXISTS, f"{text(path)}: is finished", "train a new run in another output_dir"
        )
    command = resume_command(workbench, folder)
    return workbench.jobs.start(command, title=f"train {text(path)}", folder=folder)


def _has_ended(folder: Path, jobs: Jobs) -> bool:
    """Whether no job works on a run; one that has just let go of the folder has some seconds to end."""
    until = time.monotonic() + _ENDING_SECONDS
    while is_at_work(folder, jobs):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def resume_command(workbench: Workbench, folder: Path) -> list[str]:
    """``gym train RUN/config.yaml``, with what the file does not say.

    Raises:
        GymError: As ``read_config``.
    """
    command = ["gym", "train", workbench.named(folder / "config.yaml")]
    output = str(read_config(folder).get("output_dir", ""))
    if (workbench.folder / output).resolve() != folder:  # it was begun elsewhere
        command += ["--set", f"output_dir={json.dumps(str(folder))}"]
    processes = _begun(folder).get("num_processes")
    if isinstance(processes, int) and processes > 1:
        command += ["--nproc", str(processes)]
    return command


def _begun(folder: Path) -> dict[str, Any]:
    try:
        found = read_json(folder / "run.json")
    except GymError:
        return {}
    return found if isinstance(found, dict) else {}


def _holder(folder: Path) -> psutil.Process | None:
    """The process that holds the folder's lock. A number in a file proves nothing: the process has that file open."""
    if not is_held(folder):
        return None
    lock = folder / LOCK_FILE
    try:
        process = psutil.Process(int(lock.read_text(encoding="ascii")[:20]))
        is_open = any(Path(file.path) == lock for file in process.open_files())
    except (OSError, ValueError, psutil.Error):
        return None
    return process if is_open else None
