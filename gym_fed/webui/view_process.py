"""A child process for expensive views, which starts on demand, answers JSON requests, and stops when idle.

Files may be large, broken or malicious, so they are read in this process: the server stays small and survives its
failures.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from gym_fed.core.child_process import module_command, start_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

ANSWER_SECONDS = 60.0
"""Time limit of an answer in seconds; the first one for a model imports transformers and loads its tokenizer."""
IDLE_SECONDS = 300.0
MAX_WAITING = 12
"""Maximum number of requests that are answered or wait. Each holds one of the server's 40 threads, which other pages
need."""

_log = logging.getLogger(__name__)


class ViewProcess:
    """Sends requests to the child process, one at a time. Safe from any thread.

    Args:
        views: ``module:NAME`` of a class that is created with the folder and whose ``answer`` method gets the requests.
        folder: Working directory with the files.
        offline: True to forbid requests to the Hub.
    """

    def __init__(self, views: str, folder: Path, *, offline: bool = True) -> None:
        self._views, self._folder = views, folder
        self._env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"} | (
            {"HF_HUB_OFFLINE": "1"} if offline else {}
        )
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: threading.Timer | None = None

    def ask(self, request: dict[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            GymError: The view's error; ``BUSY`` for too many requests; ``DEADLINE_EXCEEDED``; ``INTERNAL`` if the
                process has ended.
        """
        if not self._places.acquire(blocking=False):
            raise GymError(
                ErrorCode.BUSY,
                f"{counted(MAX_WAITING, 'request')} for this page wait",
                "try again in a moment",
            )
        try:
            line = self._asked(json.dumps(request).encode() + b"\n", seconds)
        finally:
            self._places.release()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise GymError.from_dict(reply["error"])
        answer: dict[str, Any] = reply["answer"]
        return answer

    def _asked(self, request: bytes, seconds: float) -> bytes:
        with self._lock:
            self._cancel_timer()
            process = self._running()
            try:
                line = self._exchanged(process, request, seconds)
            except GymError:
                self._end()
                raise
            self._start_timer()
        return line

    def begin(self) -> None:
        """Start the process, if it is not running, before the first request."""
        if self._lock.acquire(blocking=False):
            try:
                self._cancel_timer()
                self._running()
                self._start_timer()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Stop the process; the next request starts a new one."""
        with self._lock:
            self._cancel_timer()
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = start_process(
                module_command("gym_fed.webui.view_process", self._views),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._env,
            )
        return self._process

    def _exchanged(self, process: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError as error:
            raise _ended(process) from error
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            if not waiting.select(seconds):
                raise GymError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"no answer came within {seconds:.0f} seconds",
                    "select less, or use a smaller file",
                )
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise _ended(process)
        return line

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _start_timer(self) -> None:
        self._idle = threading.Timer(IDLE_SECONDS, self.stop)
        self._idle.daemon = True
        self._idle.start()

    def _cancel_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def _ended(process: subprocess.Popen[bytes]) -> GymError:
    return GymError(
        ErrorCode.INTERNAL,
        f"the process that reads this page's data ended with code {process.poll()}",
        "it may have lacked memory; choose a smaller file",
    )


def main() -> None:
    """Answer requests on standard input until it is closed, which happens at the latest when the parent exits."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep the output of libraries out of the replies
    module, _, name = sys.argv[1].partition(":")
    views = getattr(import_module(module), name)(Path.cwd())
    for line in sys.stdin:
        answers.write(json.dumps(_answer(views, json.loads(line))) + "\n")
        answers.flush()


def _answer(views: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": views.answer(request)}
    except GymError as error:
        return {"error": error.to_dict()}
    except Exception as error:  # noqa: BLE001  # errors of templates and libraries must not end the process
        problem = f"{type(error).__name__}: {error}"[:500]
        return {"error": GymError(ErrorCode.INTERNAL, f"this could not be read: {problem}").to_dict()}


if __name__ == "__main__":
    main()
