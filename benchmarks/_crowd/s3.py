"""An S3 server that keeps its objects on disk, so that it can be killed (s3rver, from npm)."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

BUCKET = "hub"
_READY_SECONDS = 60.0


class DiskS3:
    """An S3 server with one bucket on a free loopback port.

    Args:
        npm: Folder with the installed npm package ``s3rver``.
        data: Folder for the objects.
    """

    def __init__(self, npm: Path, data: Path) -> None:
        self._program = npm / "node_modules" / ".bin" / "s3rver"
        if not self._program.exists():
            raise SystemExit(f"no {self._program}: run npm install --prefix {npm} s3rver@3.7.1")
        self._data = data
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of a client; key and secret are s3rver's defaults."""
        return {
            "AWS_ACCESS_KEY_ID": "S3RVER",
            "AWS_SECRET_ACCESS_KEY": "S3RVER",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [str(self._program), "-d", str(self._data), "-a", "127.0.0.1", "-p", str(self.port), "-s"]
        self._process = subprocess.Popen([*command, "--configure-bucket", BUCKET], env=os.environ)
        end = time.monotonic() + _READY_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).close()
                return
            except OSError as error:
                if getattr(error, "code", None) is not None:  # it refuses the unsigned request
                    return
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the server with SIGKILL, to simulate a crash."""
        self._process.kill()
        self._process.wait()
