"""A reward server: graders behind HTTP, for ``grader: remote`` on other machines. For trusted networks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.evaluation.graders._combined import checked_values
from gym_fed.evaluation.graders.base import Grader, Sample

MAX_REQUEST_BYTES = 64 * 2**20
_POLL_SECONDS = 0.05


@contextmanager
def reward_server(
    graders: Sequence[Grader], *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[ThreadingHTTPServer]:
    """Serve graders while the block runs; the reward is the sum of their values.

    Args:
        graders: Set up here and torn down at the end. They grade one request at a time.
        host: The address to listen at. There is neither TLS nor a password: keep loopback, or use a proxy.
        port: 0 takes a free one; ``server.server_port`` is its number.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = self.headers.get("Content-Length") or "0"
            if not (length.isascii() and length.isdigit()):
                self._answer(
                    400, {"message": f"Content-Length is {length[:40]!r}, expected a number of bytes"}
                )
                return
            size = int(length[:20])
            if size > MAX_REQUEST_BYTES:
                self._answer(413, {"message": f"more than {MAX_REQUEST_BYTES} bytes"})
                return
            try:
                samples = _samples(json.loads(self.rfile.read(size)))
            except (ValueError, KeyError, TypeError) as error:
                self._answer(422, {"message": f"not a request of samples: {error!r}"})
                return
            try:
                with lock:
                    columns = [checked_values(g.name, g.grade(samples), len(samples)) for g in graders]
            except GymError as error:
                self._answer(error.code.http_status, error.to_dict())
                return
            except Exception as error:  # noqa: BLE001 - whatever a grader raises is reported to the caller
                self._answer(500, {"message": f"a grader failed: {type(error).__name__}: {error}"})
                return
            self._answer(200, {"rewards": [sum(values) for values in zip(*columns, strict=True)]})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: answers must not appear in logs."""

    with ExitStack() as stack:
        for grader in graders:
            stack.callback(grader.teardown)
            grader.setup()
        server = ThreadingHTTPServer((host, port), Handler)
        stack.callback(server.server_close)
        threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True).start()
        stack.callback(server.shutdown)
        yield server


def _samples(content: dict[str, Any]) -> list[Sample]:
    return [Sample(s["prompt"], str(s["completion"]), dict(s.get("row") or {})) for s in content["samples"]]
