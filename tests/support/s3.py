"""A real S3 server (moto's, from PyPI, in a virtual environment of its own), and a proxy before it that fails."""

from __future__ import annotations

import fcntl
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.wait import SECONDS

VERSION = "5.2.5"
SECRET, KEY_ID = "Heron-4-Samphire", "AKIAWILLET"
"""Found in no message and no log, as tests hold."""


def environment() -> Path | None:
    """The folder of the server's virtual environment, made the first time; None where pip cannot."""
    folder = Path.home() / ".cache" / "gym-fed-tests" / f"moto-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".installed").exists():
            made = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, check=False)
            pip = [folder / "bin" / "pip", "install", "-q", f"moto[server]=={VERSION}"]
            if made.returncode or subprocess.run(pip, capture_output=True, check=False).returncode:
                return None
            (folder / ".installed").touch()
    return folder


class S3Server:
    """On a free port of loopback, with the bucket ``hub``; everything it holds is in its memory."""

    def __init__(self, venv: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process = subprocess.Popen(
            [venv / "bin" / "moto_server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + SECONDS
        while True:
            try:
                put = urllib.request.Request(f"{self.url}/hub", method="PUT")
                urllib.request.urlopen(put, timeout=SECONDS).close()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class FailingProxy:
    """Forwards to a server; the next ``failing`` requests of a method in ``methods`` are answered with 503."""

    def __init__(self, port: int) -> None:
        self.failing = 0
        self.methods = ("GET", "HEAD", "PUT", "POST", "DELETE")
        self.seen: list[str] = []
        self.spoil = False
        """Give other bytes than those that were put."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.seen.append(self.command)
                if proxy.failing > 0 and self.command in proxy.methods:
                    proxy.failing -= 1
                    self.reply(503, {}, b"<Error><Code>SlowDown</Code></Error>")
                    return
                inner = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
                inner.request(self.command, self.path, body, dict(self.headers))
                got = inner.getresponse()
                data = got.read()
                if proxy.spoil and self.command == "GET" and data:
                    data = bytes([data[0] ^ 1]) + data[1:]
                self.reply(got.status, dict(got.getheaders()), data)
                inner.close()

            def reply(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", len(data)) if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                """Tests look at ``seen``."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def credentials(url: str) -> dict[str, str]:
    """The environment of a process that reads and writes at ``url``."""
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }


def use(url: str, monkeypatch: Any) -> None:
    """Put the credentials into this process's environment."""
    for name, value in credentials(url).items():
        monkeypatch.setitem(os.environ, name, value)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """For the tests of a module."""
    venv = environment()
    if venv is None:
        pytest.skip("moto cannot be installed from PyPI here")
    found = S3Server(venv)
    yield found
    found.close()
