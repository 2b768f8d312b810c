"""The models that `play` answers with: for each a `gym api` as a child process on loopback.

Its key is random and known to this process alone, so that no other page or program can use it. A child ends when its
standard input does: with the workbench, however that ends, and when another model is chosen.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.http.keys import KeyFile
from gym_fed.web.events import PageEvent
from gym_fed.webui.inventory import find_base, has_variants, variants_folder
from gym_fed.webui.workbench import Workbench

MAX_SERVERS = 2
"""At once: one model, or the two that are compared."""
SERVED_NAME = "base"
"""What every child calls its base, whatever its folder's name is; a variant is ``base:NAME``."""
_KEPT_LINES = 200
_LINE_LENGTH = 2000
_STOP_SECONDS = 5


class ModelServer:
    """One `gym api`, from its start to its end.

    Args:
        base: What it serves, as ``LocalModel.id``.
        folder: Where it runs.
        variants: Folder of variants; None where there is none.
        changed: Called after every change of its status.

    Attributes:
        status: ``loading``, ``ready``, ``failed``, or ``ended`` where it was stopped.
        url: Of its API, once it is ready.
        key: For its API.
    """

    def __init__(
        self, base: str, folder: Path, variants: Path | None, changed: Callable[[], None] = lambda: None
    ) -> None:
        self.base, self.has_variants = base, variants is not None
        self.status, self.url = "loading", ""
        self.started_at, self.ready_at = time.time(), 0.0
        self._changed = changed
        self._output: deque[str] = deque(maxlen=_KEPT_LINES)
        self._private = TemporaryDirectory(prefix="gym-webui-")
        keys = Path(self._private.name) / "api_keys.json"
        self.key = KeyFile(keys).add("webui", everything=True)
        store = [] if variants is None else [f"--variants={variants}"]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gym_fed.cli.main", "api", f"--base={base}", *store),
                *("--host=127.0.0.1", "--port=0", f"--api-keys={keys}", f"--set=served_name={SERVED_NAME}"),
                *("--until-eof", "--drain-seconds=0", "--json"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,  # Ctrl-C on the workbench's terminal ends it by the end of its input
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        said = self._in_thread(self._keep, self._process.stderr)
        self._in_thread(self._watch, self._process.stdout, said)

    def facts(self) -> dict[str, Any]:
        """As pages get it: without the key, and without the address."""
        ready_at = self.ready_at or time.time()
        return {
            "base": self.base,
            "status": self.status,
            "seconds": round(ready_at - self.started_at, 2),
            "has_variants": self.has_variants,
            "output": list(self._output),
        }

    def stop(self) -> None:
        """End it; answers under way are cancelled."""
        self.status = "ended"
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._in_thread(self._end)

    def wait(self) -> None:
        """Until the process has ended."""
        self._process.wait()

    def _in_thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="model-server", daemon=True)
        thread.start()
        return thread

    def _keep(self, stream: IO[str]) -> None:
        for line in stream:
            self._output.append(line.rstrip("\n")[:_LINE_LENGTH])

    def _watch(self, stream: IO[str], said: threading.Thread) -> None:
        line = stream.readline()
        with suppress(ValueError, KeyError):
            self.url = str(json.loads(line)["url"])
            if self.status == "loading":
                self.status, self.ready_at = "ready", time.time()
        self._changed()
        self._process.wait()
        said.join(_STOP_SECONDS)
        self._private.cleanup()
        if self.status != "ended":
            self.status = "failed"
        self._changed()

    def _end(self) -> None:
        for signal in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_STOP_SECONDS)
                return
            except subprocess.TimeoutExpired:
                signal()


class ModelServers:
    """Those that run now; from any thread."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._servers: dict[str, ModelServer] = {}
        self._lock = threading.Lock()

    def serve(self, bases: Sequence[str]) -> None:
        """Have these models loaded, and no others; what is loaded already stays.

        Raises:
            GymError: ``MODEL_NOT_FOUND``; ``USAGE`` for too many.
        """
        wanted = list(dict.fromkeys(bases))
        if len(wanted) > MAX_SERVERS:
            raise GymError(
                ErrorCode.USAGE,
                f"{len(wanted)} models at once; {MAX_SERVERS} are compared at most",
                "choose fewer",
            )
        for base in wanted:
            find_base(self._workbench, base)
        with self._lock:
            for base, server in list(self._servers.items()):
                if base not in wanted or not self._is_usable(server):
                    self._servers.pop(base).stop()
            for base in wanted:
                if base not in self._servers:
                    store = variants_folder() if has_variants() else None
                    self._servers[base] = ModelServer(base, self._workbench.folder, store, self._publish)
        self._publish()

    def ready(self, base: str) -> ModelServer:
        """The server of a model that is loaded.

        Raises:
            GymError: ``UNAVAILABLE`` with what to do.
        """
        server = self._servers.get(base)
        if server is not None and server.status == "ready":
            return server
        what = "is not loaded" if server is None else "is loading" if server.status == "loading" else "failed"
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{base} {what}", "choose it, and wait until it is said to be ready"
        )

    def facts(self) -> list[dict[str, Any]]:
        """Of every server, as pages get it."""
        with self._lock:
            return [server.facts() for server in self._servers.values()]

    @staticmethod
    def _is_usable(server: ModelServer) -> bool:
        """One that failed is started again, and so is one of before the first variant was made."""
        return server.status in ("loading", "ready") and (server.has_variants or not has_variants())

    def _publish(self) -> None:
        self._workbench.feed.publish(PageEvent("serving", self.facts()))


@functools.cache
def servers_of(workbench: Workbench) -> ModelServers:
    """The servers of a workbench, which its screens share."""
    return ModelServers(workbench)
