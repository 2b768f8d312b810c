"""Reading that takes memory or time, in a process beside the server: begun when first needed, ended when idle.

What it reads may be large, broken or hostile; the server stays small, and goes on when the process does not.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import threading
from pathlib import Path
from typing import Any

from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError

ANSWER_SECONDS = 60.0
"""The first answer of a model imports transformers and reads its tokenizer."""
IDLE_SECONDS = 300.0

_log = logging.getLogger(__name__)


class ViewProcess:
    """Sends requests to the process; from any thread, one at a time.

    Args:
        views: ``module:NAME`` of a class of views, made with the folder; its ``answer`` gets a request.
        folder: Where it runs; names of files are below it.
    """

    def __init__(self, views: str, folder: Path) -> None:
        self._views, self._folder = views, folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: threading.Timer | None = None

    def ask(self, request: dict[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            GymError: What the process found wrong; ``DEADLINE_EXCEEDED``; ``INTERNAL`` when it has ended.
        """
        with self._lock:
            self._cancel_timer()
            process = self._running()
            try:
                line = self._exchanged(process, json.dumps(request).encode() + b"\n", seconds)
            except GymError:
                self._end()
                raise
            self._start_timer()
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise GymError.from_dict(found["error"])
        answer: dict[str, Any] = found["answer"]
        return answer

    def begin(self) -> None:
        """Start the process, if it does not run, for requests that are likely to follow."""
        if self._lock.acquire(blocking=False):
            try:
                self._cancel_timer()
                self._running()
                self._start_timer()
            finally:
                self._lock.release()

    def stop(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._cancel_timer()
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                module_command("gym_fed.webui.view_worker", self._views),
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
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
                    "choose less, or a smaller file",
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
        f"the process that reads for this page has ended with {process.poll()}",
        "it may have lacked memory; choose a smaller file",
    )
