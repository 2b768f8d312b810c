"""Helpers that start child processes, end them with their parent, and lower their priority."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOW_PRIORITY = 10
"""Niceness that gives a tenth of the CPU time of a process of normal priority; 19 gives a hundredth, too little on a
busy machine."""
_GOES_FIRST = 500
"""OOM score adjustment, from -1000 to 1000. Linux first kills the process with the highest score."""
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "RAYON")}

_SEARCHED = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH")
"""Search paths in which an empty entry means the working directory."""
_DROPPED = ("PYTHONBREAKPOINT", "PYTHONINSPECT", "PYTHONSTARTUP")
_PASSPHRASES = ("_PASSPHRASE", "_PASSPHRASE_NEW")
_NEEDED = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SYSTEMROOT", "TZ", "VIRTUAL_ENV")


def module_command(module: str, *words: object) -> list[str]:
    """Return the command line that runs a module of gym-fed in its own process.

    ``python -m`` puts the working directory before the installed packages, so a ``yaml.py`` next to the user's data
    would be executed; ``-P`` prevents this.
    """
    return [sys.executable, "-P", "-m", module, *map(str, words)]


def start_process(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    passphrases: bool = False,
    stdin: Any = subprocess.DEVNULL,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a child process. No other function of gym-fed starts one.

    It inherits no descriptors except its standard streams and ``pass_fds``.

    Args:
        command: The program and its arguments.
        env: The environment, which is cleaned; by default that of this process.
        passphrases: True to keep the passphrases of gym-fed's keys in the environment.
        stdin: Standard input, as for ``subprocess.Popen``; by default empty.
        options: Further arguments of ``subprocess.Popen``.
    """
    return subprocess.Popen(
        list(map(str, command)), env=_cleaned(env, passphrases), stdin=stdin, close_fds=True, **options
    )


def run_process(
    command: Sequence[object], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a child process until it ends, and return its status and output, which is captured by default.

    Args:
        command: The program and its arguments.
        timeout: Seconds after which the process is killed.
        options: As in ``start_process``.

    Raises:
        subprocess.TimeoutExpired: After ``timeout``.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with start_process(command, **streams) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def shut_out_working_folder() -> None:
    """Remove the working directory from the search paths of this process and all child processes, including those of
    libraries.

    An empty entry of ``PYTHONPATH``, ``PATH`` or ``LD_LIBRARY_PATH`` means the working directory;
    ``PYTHONPATH=$PYTHONPATH:/x`` makes one.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _shut_out(os.environ)
    if entries != [""] and "" in entries:
        with suppress(OSError):  # the folder was deleted
            working = os.getcwd()
            if working in sys.path and working not in map(os.path.abspath, filter(None, entries)):
                sys.path.remove(working)


def leave_at_eof() -> None:
    """Exit when standard input is closed, as it is when the parent process ends for any reason."""
    threading.Thread(target=_wait_for_eof, name="until-eof", daemon=True).start()


def background_environment() -> dict[str, str]:
    """Return an environment for a child process with one thread, no GPU and no downloads."""
    return {**os.environ, **_ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


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


def _cleaned(given: Mapping[str, str] | None, passphrases: bool) -> dict[str, str]:
    """Return an environment for a child process, which runs and imports nothing from the working directory."""
    environment = {
        name: value
        for name, value in (os.environ if given is None else given).items()
        if name not in _DROPPED
        and (passphrases or not (name.startswith("GYM_") and name.endswith(_PASSPHRASES)))
    }
    _shut_out(environment)
    return environment


def _shut_out(environment: MutableMapping[str, str]) -> None:
    environment["PYTHONSAFEPATH"] = "1"
    if os.name == "nt":
        environment["NoDefaultCurrentDirectoryInExePath"] = "1"  # programs are searched there first
    for name in _SEARCHED:
        if name in environment:
            environment[name] = os.pathsep.join(filter(None, environment[name].split(os.pathsep)))


def _wait_for_eof() -> None:
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
