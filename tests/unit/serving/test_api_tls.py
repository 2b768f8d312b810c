"""The server's TLS: unusable files are refused at the start, and a verifying client gets answers."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gym_fed.config.serving import ConnectionsConfig, ServingConfig, TlsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http import server
from gym_fed.serving.http.server import require_usable
from tests.support.tls_files import write_tls_files
from tests.support.wait import SECONDS


def code_of(certificate: Path, key: Path) -> tuple[ErrorCode, str]:
    with pytest.raises(GymError) as caught:
        require_usable(TlsConfig(certificate=certificate, key=key))
    return caught.value.code, str(caught.value)


def test_files_that_no_connection_could_be_made_with_are_refused_by_name(tmp_path: Path) -> None:
    certificate, key = write_tls_files(tmp_path / "good")
    require_usable(TlsConfig(certificate=certificate, key=key))
    other = write_tls_files(tmp_path / "other")
    past = write_tls_files(tmp_path / "past", begins=-9, ends=-1)
    future = write_tls_files(tmp_path / "future", begins=2, ends=9)
    locked = write_tls_files(tmp_path / "locked", passphrase=b"secret")
    noise = tmp_path / "noise.pem"
    noise.write_text("noise")
    cases = [
        ((tmp_path / "none.pem", key), ErrorCode.FILE_NOT_FOUND, "tls.certificate: no file"),
        ((certificate, tmp_path / "none.pem"), ErrorCode.FILE_NOT_FOUND, "tls.key: no file"),
        ((certificate, other[1]), ErrorCode.CONFIG_INVALID, "does not match certificate"),
        (past, ErrorCode.CONFIG_INVALID, "expired at"),
        (future, ErrorCode.CONFIG_INVALID, "is not valid before"),
        (locked, ErrorCode.KEY_LOCKED, "is encrypted"),
        ((noise, key), ErrorCode.CONFIG_INVALID, "is not a PEM certificate"),
        ((certificate, noise), ErrorCode.CONFIG_INVALID, "cannot be used"),
    ]
    for files, code, said in cases:
        found, text = code_of(*files)
        assert found is code, files
        assert said in text


def test_a_server_with_such_files_does_not_start(tmp_path: Path) -> None:
    certificate, key = write_tls_files(tmp_path, begins=-9, ends=-1)
    config = ServingConfig(port=0, tls=TlsConfig(certificate=certificate, key=key))
    with pytest.raises(GymError, match="expired at"):
        server.run_server(config)


class _Running:
    """One run of the server without a model, on a loop of its own thread."""

    def __init__(self, config: ServingConfig) -> None:
        self.address = ""
        self._listening = threading.Event()
        self._config = config
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> _Running:
        self._thread.start()
        assert self._listening.wait(SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._life._on_signal)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        def listening(address: str) -> None:
            self.address = address
            self._listening.set()

        self._loop = asyncio.get_running_loop()
        nothing = lambda *_: None  # noqa: E731
        with server.listen(self._config) as listener:
            gate = server.Authenticator(None)
            self._life = server._Life(self._config, gate, listener, 0.0, listening, nothing, nothing)
            await self._life.run()
            self._life.end()


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    certificate, key = write_tls_files(tmp_path)
    monkeypatch.setattr(server, "on_stop_signals", lambda call: lambda: None)  # signals are the main thread's
    monkeypatch.setattr(
        server, "open_serving", lambda config: SimpleNamespace(close=lambda: None, tokenizer=None)
    )
    quick = ConnectionsConfig(header_seconds=0.5)
    config = ServingConfig(port=0, tls=TlsConfig(certificate=certificate, key=key), connections=quick)
    with _Running(config) as one:
        yield SimpleNamespace(address=one.address, certificate=certificate)


def test_a_client_that_checks_the_certificate_is_answered_and_one_that_does_not_know_it_leaves(
    running: Any,
) -> None:
    assert running.address.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(running.certificate))
    with httpx.Client(verify=trusting) as client:
        assert client.get(f"{running.address}/health").json() == {"status": "alive"}
    with httpx.Client(verify=ssl.create_default_context()) as client, pytest.raises(httpx.ConnectError):
        client.get(f"{running.address}/health")


def test_a_client_that_begins_no_handshake_is_closed_as_one_without_headers(running: Any) -> None:
    host, port = running.address.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as silent:  # asyncio itself would wait 60 s
        assert silent.recv(1) == b""


def test_plain_http_gets_no_answer_from_a_server_with_tls(running: Any) -> None:
    host, port = running.address.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"alive" not in plain.recv(4096)
