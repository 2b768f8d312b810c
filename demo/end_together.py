"""Processes that end with the one that started them, whatever ended that one: SIGKILL too, and grandchildren too.

``end_together()`` puts a mark into the environment, which every later child inherits, and starts a small process that
holds the other end of a pipe. When the pipe closes, because the first process is gone, it kills whatever has the mark.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MARK = "GYM_ENDS_WITH"
_POLL_SECONDS = 1.0
"""A child that was forked without exec holds the pipe too; then the parent's id shows that it is gone."""

_SCANS = 50
"""A child that is being forked while the others are killed is found by a later scan."""

_guards: dict[int, subprocess.Popen[bytes]] = {}


def end_together() -> None:
    """From now on, whatever this process starts ends with it, at the latest. Once a process; more calls do nothing."""
    if os.getpid() in _guards:
        return
    mark = secrets.token_hex(16)
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    _guards[os.getpid()] = subprocess.Popen(
        [sys.executable, "-IS", __file__, mark, str(os.getpid())],
        env=unmarked,  # another mark's guard must not take it for a child
        stdin=subprocess.PIPE,  # stays open, only in this process, until its end
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[MARK] = mark


def _guard(mark: str, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        pass
    wanted = f"{MARK}={mark}".encode()
    for _ in range(_SCANS):
        found = list(_marked(wanted))
        for pid in found:
            _kill(pid)
        if not found:
            return


def _marked(wanted: bytes) -> Iterator[int]:
    """Ids of the living processes that were started with the mark."""
    if not Path("/proc/self/environ").exists():
        listing = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True, check=True)
        for line in listing.stdout.splitlines():
            number, _, rest = line.strip().partition(b" ")
            if wanted in rest:
                yield int(number)
        return
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):  # empty for one that has ended
                    yield int(folder.name)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
