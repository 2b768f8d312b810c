"""Runs a module of this package in a process of its own, with its progress, and ends it with this one."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.portable import SIGKILL

Report = Callable[[str, int, int], None]
"""``(stage, done, total)``: what a long piece of work is at. ``total`` is 0 where it is not known."""
_LAST_LINES = 20
_LINE_CHARS = 2000
_PIPE_BYTES = 1 << 16
_FULL = re.compile(rf"(?:\[Errno|\(os error) ({errno.ENOSPC}|{errno.EDQUOT})[])]")
"""How errors of Python, and of libraries written in Rust, name the errno of a full disk."""
_PR_SET_PDEATHSIG = 1
"""``prctl``'s, from ``<sys/prctl.h>``."""


def no_report(stage: str, done: int = 0, total: int = 0) -> None:
    """Says nothing."""


def run_module(module: str, job: Mapping[str, Any], report: Report = no_report) -> tuple[int, list[str]]:
    """Run ``python -m module`` and wait for it; the job is a line of its standard input.

    The process ends with this one, however this one ends: the system ends it (Linux), or it sees its standard input
    closed. It imports nothing from the working directory (``-P``), and calls no hub.

    Args:
        module: Whose main code is ``with child_job() as (job, say): ...``.
        job: JSON; what it is to do.
        report: Gets the child's own ``say(stage, done, total)``.

    Returns:
        The exit status, and the last lines of what it wrote to its standard error.

    Raises:
        OSError: Where a full disk is what ended it.
        GymError: ``BUSY`` where want of memory is.
    """
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl-C at the terminal is this process's to answer
    )
    last: deque[str] = deque(maxlen=_LAST_LINES)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    reader = threading.Thread(target=_keep_last, args=(child.stderr, last), daemon=True)
    reader.start()
    try:
        with suppress(BrokenPipeError):  # it ended at once; its last lines say why
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        for line in child.stdout:
            _pass_on(line, report)
        status = child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        reader.join(timeout=5)
        for stream in (child.stdin, child.stdout, child.stderr):
            with suppress(BrokenPipeError):
                stream.close()
    _require_no_lack(module, status, list(last))
    return status, list(last)


def _require_no_lack(module: str, status: int, last: list[str]) -> None:
    """Refuse the end of a process that lacked memory or room on the disk.

    Raises:
        OSError: For a full disk, or a used-up quota.
        GymError: ``BUSY``.
    """
    if status == -SIGKILL or (status and any("MemoryError" in line for line in last[-1:])):
        raise GymError(
            ErrorCode.BUSY,
            f"the process of {module.rpartition('.')[2]} was killed, most likely because no memory was left",
            "close other programs, or use a machine with more memory",
        )
    if status and (full := _FULL.search(last[-1] if last else "")):
        number = int(full[1])
        raise OSError(number, os.strerror(number))


@contextmanager
def child_job() -> Iterator[tuple[dict[str, Any], Report]]:
    """In the child: the job, and what reports its progress. Its prints go to standard error."""
    _die_with_parent()
    found: dict[str, Any] = json.loads(_first_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # libraries print as they like

    def say(stage: str, done: int = 0, total: int = 0) -> None:
        own.write(json.dumps({"stage": stage, "done": done, "total": total}) + "\n")

    with own:
        yield found, say


def _first_line() -> bytes:
    """Of standard input, and no byte more."""
    found = bytearray()
    while not found.endswith(b"\n"):
        if not (more := os.read(0, _PIPE_BYTES)):
            os._exit(1)
        found += more
    return bytes(found)


def _die_with_parent() -> None:
    """On Linux the system ends this process with its parent, also while a library computes and lets no thread run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, SIGKILL)


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
        said = json.loads(line)
        report(str(said["stage"]), int(said["done"]), int(said["total"]))
    except (ValueError, KeyError, TypeError):
        return
