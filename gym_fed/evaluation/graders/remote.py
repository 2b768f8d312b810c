"""The grader that calls a reward server, and a reward server for graders; docs/graders.md has the wire format."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import Field

from gym_fed.config.train.graders import GraderConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.evaluation.graders.base import Grader, Sample, checked_values, from_environment, set_up

_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0


class RemoteConfig(GraderConfig):
    """The rewards that a server returns."""

    url: str = Field(pattern=r"^https?://")
    """The URL to which samples are posted."""

    token_env: str | None = None
    """The environment variable whose value is sent as a bearer token."""

    batch_size: int = Field(default=64, ge=1)
    """Maximum number of samples per request."""

    retries: int = Field(default=4, ge=0)
    """Maximum number of retries after lost connections and statuses 429 and 5xx, with exponential backoff."""

    timeout_seconds: float = Field(default=60.0, gt=0)
    max_request_bytes: int = Field(default=16 * 2**20, ge=1)
    max_response_bytes: int = Field(default=2**20, ge=1)


class Remote(Grader):
    """Posts ``{"samples": [{"prompt", "completion", "row"}]}`` and reads ``{"rewards": [number]}``."""

    Settings = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: RemoteConfig) -> None:
        super().__init__(config)
        self._token = from_environment(config.token_env, self.name, "token_env")
        self._client: Any = None

    def setup(self) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        self._client = httpx.Client(timeout=self.config.timeout_seconds, headers=headers)

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        size = self.config.batch_size
        return [
            reward
            for start in range(0, len(samples), size)
            for reward in self._rewards(samples[start : start + size])
        ]

    def teardown(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _rewards(self, samples: Sequence[Sample]) -> list[float]:
        answer = self._post(self._body(samples))
        try:
            rewards = json.loads(answer)["rewards"]
            if not isinstance(rewards, list) or any(isinstance(r, bool | str) or r is None for r in rewards):
                raise TypeError("rewards is not a list of numbers")
            numbers = [float(reward) for reward in rewards]
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise self._invalid('the answer is not {"rewards": [number, ...]}') from error
        if len(numbers) != len(samples):
            raise self._invalid(f"{counted(len(numbers), 'reward')} for {counted(len(samples), 'sample')}")
        if not all(math.isfinite(number) for number in numbers):
            raise self._invalid("a reward is not finite")
        return numbers

    def _body(self, samples: Sequence[Sample]) -> bytes:
        try:
            body = json.dumps(
                {
                    "samples": [
                        {"prompt": s.prompt, "completion": s.completion, "row": dict(s.row)} for s in samples
                    ]
                },
                allow_nan=False,
            ).encode()
        except (TypeError, ValueError) as error:
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"grader {self.name}: a row cannot be sent as JSON: {error}",
                "remove columns such as images from the rows",
            ) from error
        if len(body) > self.config.max_request_bytes:
            raise GymError(
                ErrorCode.TOO_LARGE,
                f"grader {self.name}: a request has {counted(len(body), 'byte')}, but max_request_bytes is "
                f"{self.config.max_request_bytes}",
                "lower batch_size, or raise the limit",
            )
        return body

    def _post(self, body: bytes) -> bytes:
        """Return the response's body; retry after errors that may be temporary."""
        import httpx

        problem, code = "", ErrorCode.UNAVAILABLE
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(min(_FIRST_WAIT_SECONDS * 2 ** (attempt - 1), _LONGEST_WAIT_SECONDS))
            try:
                status, answer = self._once(body)
            except httpx.TimeoutException:
                problem, code = "did not answer in time", ErrorCode.DEADLINE_EXCEEDED
                continue
            except httpx.TransportError as error:
                problem, code = f"cannot be reached ({type(error).__name__})", ErrorCode.UNAVAILABLE
                continue
            if status == 200:
                return answer
            problem, code = f"answered with status {status}", ErrorCode.UNAVAILABLE
            if status != 429 and status < 500:
                break
        raise GymError(
            code,
            f"grader {self.name}: {self.config.url} {problem}",
            "check the reward server's log and the url",
        )

    def _once(self, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        with self._client.stream("POST", self.config.url, content=body, headers=headers) as response:
            answer = bytearray()
            for chunk in response.iter_bytes():
                answer += chunk
                if len(answer) > self.config.max_response_bytes:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"grader {self.name}: {self.config.url} answered with more than max_response_bytes "
                        f"({self.config.max_response_bytes})",
                        "lower batch_size, or raise the limit",
                    )
            return int(response.status_code), bytes(answer)

    def _invalid(self, problem: str) -> GymError:
        return GymError(
            ErrorCode.DATA_INVALID,
            f"grader {self.name}: {self.config.url}: {problem}",
            "the server must return one finite number per sample, in order",
        )


MAX_REQUEST_BYTES = 64 * 2**20
_POLL_SECONDS = 0.05


@contextmanager
def reward_server(
    graders: Sequence[Grader], *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[ThreadingHTTPServer]:
    """Serve graders while the block runs; the reward is the sum of their values.

    Args:
        graders: The graders, which are set up here and torn down at the end. They grade one request at a time.
        host: The address to listen on. There is neither TLS nor a password: use loopback, or a proxy.
        port: The port to listen on; 0 selects a free one, given by ``server.server_port``.
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
            except (ValueError, RecursionError, KeyError, TypeError) as error:
                self._answer(422, {"message": f"the request has no valid samples: {error!r}"})
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

    with set_up(graders), ExitStack() as stack:
        server = ThreadingHTTPServer((host, port), Handler)
        stack.callback(server.server_close)
        threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True).start()
        stack.callback(server.shutdown)
        yield server


def _samples(content: dict[str, Any]) -> list[Sample]:
    return [Sample(s["prompt"], str(s["completion"]), dict(s.get("row") or {})) for s in content["samples"]]
