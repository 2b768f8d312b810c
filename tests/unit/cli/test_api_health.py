"""`gym api health`: whether the server of a config answers, over HTTP or TLS."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext

import pytest
from typer.testing import CliRunner, Result

from gym_fed.cli.main import app
from gym_fed.core.addresses import host_port
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.tls_files import write_tls_files


class Loading(BaseHTTPRequestHandler):
    """A server whose model is being loaded."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
        self.wfile.write(b'{"error": "the model is being loaded"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["http", "https"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    server = HTTPServer(("127.0.0.1", 0), Loading)
    text = f"host: 127.0.0.1\nport: {server.server_port}\n"
    if request.param == "https":
        certificate, key = write_tls_files(tmp_path)
        context = SSLContext(PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        text += f"tls: {{certificate: {certificate}, key: {key}}}\n"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    path = tmp_path / "serving.yaml"
    path.write_text(text)
    yield path
    server.shutdown()
    thread.join()
    server.server_close()


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["api", "health", *words])


def test_a_server_that_loads_is_alive_and_not_ready(config: Path) -> None:
    alive = ask(str(config), "--live", "--json")
    assert (alive.exit_code, json.loads(alive.stdout)["ready"]) == (0, None), alive.exception
    waits = ask(str(config))
    assert isinstance(waits.exception, GymError)
    assert waits.exception.code is ErrorCode.UNAVAILABLE
    assert "503" in waits.exception.message
    assert "being loaded" in waits.exception.message


def test_another_certificate_than_the_configs_is_refused(tmp_path: Path) -> None:
    certificate, key = write_tls_files(tmp_path / "other")
    context = SSLContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = HTTPServer(("127.0.0.1", 0), Loading)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    ours = write_tls_files(tmp_path)
    path = tmp_path / "serving.yaml"
    path.write_text(f"port: {server.server_port}\ntls: {{certificate: {ours[0]}, key: {ours[1]}}}\n")
    refused = ask(str(path), "--live")
    server.shutdown()
    thread.join()
    server.server_close()
    assert isinstance(refused.exception, GymError)
    assert "CERTIFICATE_VERIFY_FAILED" in refused.exception.message


def test_no_server_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = ask("--address", f"127.0.0.1:{port}", "--live")
    assert isinstance(refused.exception, GymError)
    assert refused.exception.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("'::'", "[::1]")])
def test_the_address_of_all_interfaces_is_asked_on_this_machine(
    host: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []
    monkeypatch.setattr("gym_fed.cli.api.app._get", lambda url, *_: urls.append(url))
    path = tmp_path / "serving.yaml"
    path.write_text(f"host: {host}\nport: 8000\napi_keys: keys.json\n")
    assert ask(str(path)).exit_code == 0
    assert urls == [f"http://{asked}:8000/ready"]


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("box", "box")])
def test_flags_name_the_server_to_ask_and_do_not_change_its_config(
    host: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []
    monkeypatch.setattr("gym_fed.cli.api.app._get", lambda url, *_: urls.append(url))
    path = tmp_path / "serving.yaml"
    path.write_text("host: 127.0.0.1\nport: 8000\n")
    done = ask(str(path), "--address", host_port(host, 9000))
    assert done.exit_code == 0, done.exception
    assert urls == [f"http://{asked}:9000/ready"]
    assert ask("--address", host_port(host, 8000)).exit_code == 0  # without a config, so without keys
    assert urls[1] == f"http://{asked}:8000/ready"
    refused = ask("--address", "box:0").exception
    assert isinstance(refused, GymError)
    assert refused.code is ErrorCode.USAGE


def test_a_probe_loads_no_torch() -> None:
    program = (
        "import sys\nfrom gym_fed.cli.main import app\n"
        "try:\n    app(['api', 'health', '--address', '127.0.0.1:1', '--live'], standalone_mode=False)\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
        "print({'torch', 'transformers', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["GymError", "set()"]
