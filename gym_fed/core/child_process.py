"""Helpers that start child processes, end them with their parent, and lower their priority."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

_LOW_PRIORITY = 10
"""Niceness that gives a tenth of the CPU time of a process of normal priority; 19 gives a hundredth, too little on a
busy machine."""
_GOES_FIRST = 500
"""OOM score adjustment, from -1000 to 1000. Linux first kills the process with the highest score."""
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "RAYON")}

_NEEDED = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SYSTEMROOT", "TZ", "VIRTUAL_ENV")


def module_command(module: str, *words: object) -> list[str]:
    """Return the command line that runs a module of gym-fed in its own process.

    ``python -m`` puts the working directory before the installed packages, so a ``yaml.py`` next to the user's data
    would be executed; ``-P`` prevents this.
    """
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def shut_out_working_folder() -> None:
    """Remove the working directory from the import path of this process and all child processes, including those of
    libraries.

    Python reads an empty entry of ``PYTHONPATH`` as the working directory; ``PYTHONPATH=$PYTHONPATH:/x`` makes one.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if entries != [""] and "" in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
        with suppress(OSError):  # the folder was deleted
            working = os.getcwd()
            if working in sys.path and working not in map(os.path.abspath, filter(None, entries)):
                sys.path.remove(working)


def leave_at_eof() -> None:
    """Exit when standard input is closed, as it is when the parent process ends for any reason."""
    threading.Thread(target=_wait_for_eof, name="until-eof", daemon=True).start()


def background_environment(without: tuple[str, ...] = ()) -> dict[str, str]:
    """Return an environment for a child process with one thread, no GPU and no downloads.

    Args:
        without: Names of the environment variables to remove.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return {**environment, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def minimal_environment() -> dict[str, str]:
    """Return an environment without secrets: what Python needs to find its libraries, one thread, offline."""
    environment = {name: value for name, value in os.environ.items() if name in _NEEDED}
    return {**environment, **_ONE_THREAD, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}


def put_last(pid: int) -> None:
    """Give a new process a low CPU priority, and make it the first candidate of the OOM killer."""
    with suppress(OSError, AttributeError):  # missing on Windows
        os.setpriority(os.PRIO_PROCESS, pid, _LOW_PRIORITY)
    with suppress(OSError):  # no /proc
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(_GOES_FIRST), encoding="ascii")


def _wait_for_eof() -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
