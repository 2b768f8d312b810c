"""vLLM servers: one that the gateway starts, monitors and restarts, and one that runs independently."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gym_fed.core.child_process import start_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.vllm.client import VllmAddress, VllmClient

log = logging.getLogger("gym_fed.vllm")

_POLL_SECONDS = 0.5
_WATCH_SECONDS = 5.0
_UNHEALTHY = 6
"""Consecutive failed health checks, of up to 30 seconds each, after which a running vLLM is killed."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_STOP_SECONDS = 10.0
_SHOWN_LINES = 40


class VllmProcess:
    """A vLLM server on a Unix socket, in its own process group. It is restarted whenever it exits.

    Args:
        command: Function that returns the command line for a socket's path.
        environment: The environment.
        folder: A private folder for the socket, with a short path, since the length of socket paths is limited.
        base: The base's name in vLLM.
        key: The API key, which ``environment`` also passes to vLLM.
        start_seconds: Maximum number of seconds for vLLM to answer after it is started.

    Raises:
        GymError: ``UNAVAILABLE`` if the first start fails, with the last lines of vLLM's log.
    """

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        environment: dict[str, str],
        folder: Path,
        base: str,
        key: str,
        start_seconds: float,
    ) -> None:
        self.base = base
        self.address = VllmAddress("http://vllm", folder / "vllm.sock", key)
        self.on_change: Callable[[], None] = lambda: None
        self.starts = 0
        """The number of times that vLLM was started."""
        self._command, self._environment, self._start_seconds = command, environment, start_seconds
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._ready, self._closing = threading.Event(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        self._thread = threading.Thread(target=self._watch, name="gym-fed-vllm-watch", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def pid(self) -> int | None:
        """The id of vLLM's first process, the leader of the process group; None if there is none."""
        return None if self._process is None else self._process.pid

    def suspect(self) -> None:
        """Treat vLLM as unavailable until it answers a health check."""
        self._ready.clear()

    def close(self) -> None:
        """Stop all processes of vLLM. May be called repeatedly."""
        self._closing.set()
        self._ready.clear()
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._kill()

    def _start(self) -> None:
        """Start vLLM, and wait until it answers.

        Raises:
            GymError: ``UNAVAILABLE`` if it exits or does not answer in time.
        """
        socket = self.address.socket
        assert socket is not None
        socket.unlink(missing_ok=True)  # a killed vLLM leaves its socket behind, which cannot be bound again
        self.starts += 1
        self._lines.clear()
        process = start_process(
            self._command(socket),
            env=self._environment,
            stdin=subprocess.PIPE,  # the launcher exits when this pipe closes, that is, when the gateway exits
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._process = process
        threading.Thread(target=self._read, args=(process,), name="gym-fed-vllm-log", daemon=True).start()
        deadline = time.monotonic() + self._start_seconds
        while not (socket.exists() and _healthy(self.address)):
            if self._closing.is_set():
                raise GymError(ErrorCode.UNAVAILABLE, "vLLM was closed during startup")
            if process.poll() is not None:
                time.sleep(_POLL_SECONDS)  # wait for the last lines of its log
                raise self._failed(f"vLLM exited with status {process.returncode} during startup")
            if time.monotonic() > deadline:
                raise self._failed(f"vLLM did not answer within {self._start_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        self._ready.set()
        self.on_change()

    def _failed(self, message: str) -> GymError:
        lines = "\n".join(self._lines)
        return GymError(
            ErrorCode.UNAVAILABLE, f"{message}; last lines of its log:\n{lines}", "fix the reported problem"
        )

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip())
            log.info("%s", line.rstrip())

    def _watch(self) -> None:
        while not self._closing.is_set():
            reason = self._until_it_fails()
            self._ready.clear()
            self.on_change()
            self._kill()
            if not self._closing.is_set():
                log.error(
                    "vLLM %s; restarting it. Last lines of its log:\n%s", reason, "\n".join(self._lines)
                )
                self._start_again()

    def _until_it_fails(self) -> str:
        process, failures = self._process, 0
        assert process is not None
        checked = time.monotonic()
        while not self._closing.wait(_POLL_SECONDS):
            if process.poll() is not None:
                return f"exited with status {process.returncode}"
            if not self.ready or time.monotonic() - checked >= _WATCH_SECONDS:
                healthy = _healthy(self.address)
                failures = 0 if healthy else failures + 1
                checked = time.monotonic()
                if healthy and not self.ready and not self._closing.is_set():
                    self._ready.set()
                    self.on_change()
                if failures >= _UNHEALTHY:
                    return f"failed {failures} health checks in a row"
        return "is closed"

    def _start_again(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            try:
                self._start()
            except (GymError, OSError) as error:
                self._kill()
                if self._closing.is_set():
                    return
                log.error("vLLM could not be started: %s; retrying in %g s", error, pause)
                self._closing.wait(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
            else:
                return

    def _stop(self) -> None:
        """Send SIGTERM to the process group, and wait for a clean exit."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)

    def _kill(self) -> None:
        """Kill the process group, since engine and workers may outlive the first process."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


class RemoteVllm:
    """A vLLM server with gym-fed's plug-in that runs independently; it is only monitored."""

    def __init__(self, address: VllmAddress, base: str) -> None:
        self.address, self.base = address, base
        self.on_change: Callable[[], None] = lambda: None
        self._ready, self._closing = threading.Event(), threading.Event()
        self._ready.set()
        self._thread = threading.Thread(target=self._watch, name="gym-fed-vllm-watch", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def suspect(self) -> None:
        """Treat vLLM as unavailable until it answers a health check."""
        self._ready.clear()

    def close(self) -> None:
        """Stop watching the server. May be called repeatedly."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_SECONDS):
            healthy = _healthy(self.address)
            if healthy != self.ready:
                log.warning(
                    "vLLM at %s %s", self.address.url, "answers again" if healthy else "does not answer"
                )
                (self._ready.set if healthy else self._ready.clear)()
                self.on_change()


def _healthy(address: VllmAddress) -> bool:
    async def ask() -> bool:
        client = VllmClient(address)
        try:
            return await client.is_healthy()
        finally:
            await client.close()

    return asyncio.run(ask())


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder that only this user can enter, for the socket and the folder on ``PYTHONPATH``."""
    return tempfile.TemporaryDirectory(prefix="gym-vllm-")
