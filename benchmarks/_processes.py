"""Start child processes, watch their peak memory, and stop them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demo.end_together import end_together

_SAMPLE_SECONDS = 0.05
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Measurement:
    """The measurement of one transfer of ``megabytes`` (10**6 bytes), ``up`` (client to server) or ``down``.

    ``peak_rss_mb`` has the peak resident memory of every process by role, in megabytes.
    """

    system: str
    direction: str
    megabytes: int
    seconds: float
    peak_rss_mb: Mapping[str, float]


def moved(
    system: str,
    direction: str,
    megabytes: int,
    role_of: Callable[[Sequence[str]], str | None],
    run: Callable[[Processes, Path, Path], None],
) -> Measurement:
    """Move random bytes between a client and a server, and check that they arrived.

    ``run`` gets the processes, the payload, and a file for the ServerApp's result.
    """
    with tempfile.TemporaryDirectory(prefix="gym-transport-") as name:
        payload, result = Path(name) / "payload", Path(name) / "result.json"
        payload.write_bytes(os.urandom(megabytes * MEGABYTE))
        digest = hashlib.sha256(payload.read_bytes()).hexdigest()
        with Processes(Path(name), role_of) as processes:
            run(processes, payload, result)
            processes.wait_for("result", result.exists, 300)
        found = json.loads(result.read_text())
        if (found["sha256"], found["size"]) != (digest, megabytes * MEGABYTE):
            raise RuntimeError(f"{system} delivered {found}, not {megabytes} MB of sha256 {digest}")
        return Measurement(system, direction, megabytes, found["seconds"], dict(processes.peak_rss_mb))


class Processes:
    """A context manager that stops its processes and their children at the end; logs are files in ``folder``.

    Args:
        folder: Where they run.
        role_of: The role of a command line, whose peak memory is kept; None for other commands.
        sample_seconds: Time between two samples of their memory.
    """

    def __init__(
        self,
        folder: Path,
        role_of: Callable[[Sequence[str]], str | None],
        sample_seconds: float = _SAMPLE_SECONDS,
    ) -> None:
        self.folder = folder
        self.peak_rss_mb: dict[str, float] = {}
        self._role_of = role_of
        self._sample_seconds = sample_seconds
        self._started: list[psutil.Popen] = []
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> psutil.Popen:
        """Start ``command``, with its output in ``NAME.log``."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = psutil.Popen(
                list(command),
                cwd=self.folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def wait_for(self, what: str, ready: Callable[[], bool], timeout_seconds: float) -> None:
        """Poll until ``ready`` returns True."""
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            died = [p for p in self._started if p.poll() not in (None, 0)]
            if died or time.monotonic() > deadline:
                why = (
                    f"{died[0].args} ended with {died[0].returncode}"
                    if died
                    else f"{timeout_seconds} s passed"
                )
                raise RuntimeError(f"no {what}: {why}\n{self.logs()}")
            time.sleep(_SAMPLE_SECONDS)

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in files)

    def __enter__(self) -> Processes:
        end_together()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._watcher.join()
        everyone = [p for root in self._started for p in _family(root)]
        for process in everyone:
            _signal(process, "terminate")
        _, left = psutil.wait_procs(everyone, timeout=5)
        for process in left:
            _signal(process, "kill")
        psutil.wait_procs(left, timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(self._sample_seconds):
            for process in [p for root in list(self._started) for p in _family(root)]:
                try:
                    role, peak = self._role_of(process.cmdline()), _peak_rss_mb(process)
                except (psutil.Error, FileNotFoundError, ProcessLookupError):
                    continue  # it ended after it was listed
                if role is not None:
                    self.peak_rss_mb[role] = max(peak, self.peak_rss_mb.get(role, 0.0))


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, name: str) -> None:
    try:
        getattr(process, name)()
    except psutil.NoSuchProcess:
        return


def _peak_rss_mb(process: psutil.Process) -> float:
    """Return the kernel's high-water mark on Linux, else the current memory, in megabytes."""
    status = Path(f"/proc/{process.pid}/status")
    if status.parent.parent.joinpath("self").exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return float(process.memory_info().rss) / 1e6
