"""Child processes that run modules of this package, report progress, and end with their parent."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from gym_fed.core.child_process import module_command, start_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.library_env import without_collection
from gym_fed.core.portable import SIGKILL

Report = Callable[[str, int, int], None]
"""Called with ``(stage, done, total)``, the progress of a long operation. ``total`` is 0 if unknown."""
_LAST_LINES = 20
_LINE_CHARS = 2000
_PIPE_BYTES = 1 << 16
_FULL = re.compile(rf"(?:\[Errno|\(os error) ({errno.ENOSPC}|{errno.EDQUOT})[])]")
"""Matches the errno of a full disk in errors from Python and from libraries written in Rust."""
_PR_SET_PDEATHSIG = 1
"""``prctl``'s constant, from ``<sys/prctl.h>``."""


def no_report(stage: str, done: int = 0, total: int = 0) -> None:
    """Ignore progress."""


class ModuleProcess:
    """``python -m module`` in its own process, which runs one job.

    It is started before the job is known, so that it imports its libraries while this process does other work. It
    always ends with this process: the system kills it (Linux), or it sees its standard input closed. It imports nothing
    from the working directory (``-P``), and does not access the Hub.

    Args:
        module: A module whose main code is ``with child_job() as (job, say): ...``.
        libraries: Modules to import before the job arrives.
    """

    def __init__(self, module: str, libraries: Sequence[str] = ()) -> None:
        self._module = module
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._child = start_process(
            module_command(module),
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C at the terminal is handled by this process
        )
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader = threading.Thread(target=_keep_last, args=(self._child.stderr, self._last), daemon=True)
        self._reader.start()
        self._send(list(libraries))

    def run(self, job: Mapping[str, Any], report: Report = no_report) -> tuple[int, list[str]]:
        """Run the job and wait for its end.

        Args:
            job: The job, as JSON values.
            report: Called with the child's progress.

        Returns:
            The exit status, and the last lines of the child's standard error.

        Raises:
            OSError: If the child ended because of a full disk.
            GymError: ``BUSY`` if it ended for lack of memory.
        """
        assert self._child.stdout is not None
        try:
            self._send(job)
            for line in self._child.stdout:
                _pass_on(line, report)
            status = self._child.wait()
        finally:
            self.close()
        _require_resources(self._module, status, list(self._last))
        return status, list(self._last)

    def close(self) -> None:
        """End the child if it is still running, and free its resources."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._reader.join(timeout=5)
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _send(self, line: object) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it exited immediately; its last lines say why
            self._child.stdin.write(json.dumps(line) + "\n")
            self._child.stdin.flush()


class Processes:
    """The child processes of one export; unused ones end with the block."""

    def __init__(self) -> None:
        self._started: dict[str, ModuleProcess] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        while self._started:
            self._started.popitem()[1].close()

    def start(self, module: str, libraries: Sequence[str] = ()) -> None:
        """Start ``python -m module`` before its job is known, unless one is already waiting; see ``ModuleProcess``."""
        if module not in self._started:
            self._started[module] = ModuleProcess(module, libraries)

    def run(self, module: str, job: Mapping[str, Any], report: Report = no_report) -> tuple[int, list[str]]:
        """Give the job to the process that was started for it, or to a new one; see ``ModuleProcess.run``."""
        return (self._started.pop(module, None) or ModuleProcess(module)).run(job, report)


def _require_resources(module: str, status: int, last: list[str]) -> None:
    """Raise an error if a process ended for lack of memory or disk space.

    Raises:
        OSError: For a full disk, or an exhausted quota.
        GymError: ``BUSY``.
    """
    if status == -SIGKILL or (status and any("MemoryError" in line for line in last[-1:])):
        raise GymError(
            ErrorCode.BUSY,
            f"the process of {module.rpartition('.')[2]} was killed, most likely because memory ran out",
            "close other programs, or use a machine with more memory",
        )
    if status and (full := _FULL.search(last[-1] if last else "")):
        number = int(full[1])
        raise OSError(number, os.strerror(number))


@contextmanager
def child_job() -> Iterator[tuple[dict[str, Any], Report]]:
    """In the child: import the libraries, and yield the job and a function that reports its progress.

    Anything printed in the block goes to standard error.
    """
    _die_with_parent()
    with without_collection(freeze=True):
        for name in json.loads(_next_line()):
            with suppress(ImportError):  # the job reports it, or works without it
                import_module(name)
    job: dict[str, Any] = json.loads(_next_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    progress = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # libraries may print to standard output

    def say(stage: str, done: int = 0, total: int = 0) -> None:
        progress.write(json.dumps({"stage": stage, "done": done, "total": total}) + "\n")

    with progress:
        yield job, say


def leave(status: int | None = 0) -> NoReturn:
    """Exit from a child whose job is done, without spending a second on unloading torch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _next_line() -> bytes:
    """Read one line of standard input, unbuffered: a buffer's lock would make an exit after an error hang."""
    with open(0, "rb", buffering=0, closefd=False) as raw:
        line = raw.readline()
    if not line.endswith(b"\n"):
        os._exit(1)  # the parent has exited
    return line


def _die_with_parent() -> None:
    """Let Linux kill this process with its parent, even while a library blocks all threads."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, SIGKILL)
        pipe = select.poll()
        pipe.register(0, 0)  # a closed pipe is reported in any case
        if pipe.poll(0):
            os._exit(1)  # the parent ended before the call, so no signal will come


def _end_with_parent() -> None:
    while os.read(0, _PIPE_BYTES):
        pass
    os._exit(1)


def _keep_last(stream: Any, last: deque[str]) -> None:
    while line := stream.readline(_LINE_CHARS):
        if line.strip():
            last.append(line.rstrip("\n"))


def _pass_on(line: str, report: Report) -> None:
    try:
        message = json.loads(line)
        report(str(message["stage"]), int(message["done"]), int(message["total"]))
    except (ValueError, RecursionError, KeyError, TypeError):
        return
