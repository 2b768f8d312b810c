"""Answer prompts from pages with a `gym api` child process on loopback.

The API key is random and known only to this process, so no other page or program can use the server. The child exits
when its standard input is closed, which happens when the parent exits.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import httpx

from gym_fed.core.child_process import module_command, put_last, start_process
from gym_fed.core.errors import GymError
from gym_fed.serving.http.keys import KeyFile

SERVED_NAME = "base"
"""Name under which every base is served; a variant is ``base:NAME``."""
KEPT_LINES = 200
LINE_LENGTH = 2000
_STOP_SECONDS = 5
_CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 600.0
"""Maximum seconds between two tokens; `gym api` itself limits the time of an answer."""
ENDED = "the model's server has ended; its output says why"


class ModelServer:
    """A `gym api` process.

    Args:
        base: Name or folder of the base to serve.
        folder: Working directory.
        variants: Folder of variants; None if there is none.
        changed: Called after every change of the status.
        settings: Additional ``a.b=value`` settings of ``ServingConfig``.
        environment: Environment variables of the process; None for those of this process.
        is_last: True to run the process with a low priority.

    Attributes:
        status: ``loading``, ``ready``, ``failed``, or ``ended`` after it was stopped.
        url: URL of its API, once it is ready.
        key: Key of its API.
    """

    def __init__(
        self,
        base: str,
        folder: Path,
        variants: Path | None,
        changed: Callable[[], None] = lambda: None,
        *,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        is_last: bool = False,
    ) -> None:
        self.base, self.has_variants = base, variants is not None
        self.status, self.url = "loading", ""
        self.started_at, self.ready_at = time.time(), 0.0
        self._changed = changed
        self._output: deque[str] = deque(maxlen=KEPT_LINES)
        self._private = TemporaryDirectory(prefix="gym-pages-")
        keys = Path(self._private.name) / "api_keys.json"
        self.key = KeyFile(keys).add("pages", everything=True)
        store = ["--set=variants=null"] if variants is None else [f"--variants={variants}"]
        self._process = start_process(
            [
                *module_command("gym_fed.cli.main", "api", f"--base={base}", *store),
                *("--host=127.0.0.1", "--port=0", f"--api-keys={keys}"),
                *(f"--set={setting}" for setting in (f"served_name={SERVED_NAME}", *settings)),
                *("--until-eof", "--drain-seconds=0", "--json"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it directly
            text=True,
            errors="replace",
        )
        if is_last:
            put_last(self._process.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        reader = self._in_thread(self._keep, self._process.stderr)
        self._in_thread(self._watch, self._process.stdout, reader)

    def facts(self) -> dict[str, Any]:
        """Return the server's state for pages, without the key and the address."""
        ready_at = self.ready_at or time.time()
        return {
            "base": self.base,
            "status": self.status,
            "seconds": round(ready_at - self.started_at, 2),
            "has_variants": self.has_variants,
            "output": list(self._output),
        }

    def stop(self) -> None:
        """Stop the process and cancel its answers."""
        self.status = "ended"
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._in_thread(self._end)

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    def _in_thread(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="model-server", daemon=True)
        thread.start()
        return thread

    def _keep(self, stream: IO[str]) -> None:
        for line in stream:
            error = GymError.last_in(line)
            text = line.rstrip("\n") if error is None else f"error ({error.code.value}): {error}"
            self._output.append(text[:LINE_LENGTH])

    def _watch(self, stream: IO[str], reader: threading.Thread) -> None:
        line = stream.readline()
        with suppress(ValueError, KeyError):
            self.url = str(json.loads(line)["url"])
            if self.status == "loading":
                self.status, self.ready_at = "ready", time.time()
        self._changed()
        self._process.wait()
        reader.join(_STOP_SECONDS)
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


async def stream_answer(url: str, key: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Stream a response of `gym api`; closing the stream cancels the answer.

    Args:
        url: URL of the API.
        key: Key of the API.
        body: Request body with ``stream`` set.
    """
    timeout = httpx.Timeout(ANSWER_SECONDS, connect=_CONNECT_SECONDS)
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False) as client,
            client.stream("POST", url, json=body, headers={"Authorization": f"Bearer {key}"}) as response,
        ):
            if response.status_code != 200:
                yield _failed(refusal_of(await response.aread()))
                return
            async for part in response.aiter_raw():
                yield part
    except httpx.TransportError:
        yield _failed(ENDED)


def refusal_of(data: bytes) -> str:
    """Return the message in an error response of `gym api`."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "the model's server refused the request"


def _failed(why: str) -> bytes:
    """Return the event that ends a failed stream instead of ``[DONE]``, as in `gym api`."""
    return f"data: {json.dumps({'error': {'message': why}})}\n\n".encode()
