"""`gym api` and slow or silent connections, over real sockets: they are closed, and never keep a caller out."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse

import httpx
import pytest

from gym_fed.config.serving import ConnectionsConfig, ServingConfig
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.connections import MAX_HEADER_BYTES, LimitedServer
from gym_fed.serving.http.server import listen
from tests.support.scripted_engine import ScriptedEngine
from tests.support.wait import SECONDS
from tests.unit.serving.test_api_app import gateway_over

LIMITS = ConnectionsConfig(max_connections=200, max_per_address=100, header_seconds=1.0, body_seconds=3.0)
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


class Api:
    """The application with its limits, on a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.listener = listen(ServingConfig(port=0))
        self.port: int = self.listener.getsockname()[1]
        app = create_app(gateway_over(ScriptedEngine()))
        self.server = LimitedServer(app, LIMITS, None, stop_seconds=1)
        self.connections = self.server.connections
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()

    async def _serve(self) -> None:
        watching = asyncio.ensure_future(self.connections.watch())
        await self.server.serve(sockets=[self.listener])
        watching.cancel()

    def ask(self) -> int:
        body = {"model": "nano", "prompt": "x"}
        return httpx.post(
            f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=SECONDS
        ).status_code

    def connect(self, stack: ExitStack, sent: bytes = b"") -> socket.socket:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), 30))
        connection.sendall(sent)
        return connection


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    found = Api()
    yield found
    found.server.should_exit = True
    found.thread.join(SECONDS)


def is_closed(connection: socket.socket) -> bool:
    """Waits for the other end to hang up."""
    connection.settimeout(SECONDS)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_eleven_hundred_silent_connections_keep_nobody_out_and_are_closed(api: Api) -> None:
    with ExitStack() as stack:
        silent = [api.connect(stack) for _ in range(1_100)]
        assert api.ask() == 200
        assert len(api.connections) <= LIMITS.max_per_address
        assert api.ask() == 200
        assert all(map(is_closed, silent))
    assert api.ask() == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: 127",
        REQUEST + b"Content-Length: 1000\r\n\r\n{",
        REQUEST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
    ],
    ids=["nothing", "half a header", "a body that stops", "a chunk that stops"],
)
def test_a_request_that_stops_on_the_way_is_closed(api: Api, sent: bytes) -> None:
    with ExitStack() as stack:
        assert is_closed(api.connect(stack, sent))
    assert api.ask() == 200


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\nx-a: ", REQUEST + b"Content-Length: 100000\r\n\r\n"],
    ids=["headers", "body"],
)
def test_a_request_that_trickles_is_closed_though_bytes_keep_coming(api: Api, begin: bytes) -> None:
    with ExitStack() as stack:
        connection = api.connect(stack, begin)
        connection.settimeout(0.05)
        for _ in range(2_000):
            try:
                connection.sendall(b"x")
                assert connection.recv(1) == b""
                return
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                return
    raise AssertionError("it was let trickle for ever")


def test_headers_without_end_are_cut_off_before_they_fill_the_memory(api: Api) -> None:
    with ExitStack() as stack:
        connection = api.connect(stack, b"GET / HTTP/1.1\r\n")
        headers = b"".join(b"x-%d: " % number + b"y" * MAX_HEADER_BYTES + b"\r\n" for number in range(200))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(headers)
    assert api.ask() == 200


def test_a_second_request_on_a_kept_connection_is_timed_like_the_first(api: Api) -> None:
    with ExitStack() as stack:
        connection = api.connect(stack, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200
        answer.read()  # head and body may come apart
        connection.sendall(b"GET /health HT")
        assert is_closed(connection)


def test_who_is_being_answered_is_not_the_one_that_makes_room(api: Api) -> None:
    with ExitStack() as stack:
        asking = api.connect(stack, REQUEST + b"Content-Length: 32\r\n\r\n")
        assert api.ask() == 200  # by now the server has read the head of the first request
        for _ in range(LIMITS.max_per_address + 20):
            api.connect(stack)
        asking.sendall(b'{"model": "nano", "prompt": "x"}')
        assert asking.recv(4096).startswith(b"HTTP/1.1 200")
