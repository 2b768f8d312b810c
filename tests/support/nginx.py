"""nginx in front of servers of this machine, each below a path prefix."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.ports import free_port
from tests.support.wait import SECONDS

CONFIG = """
daemon off; pid {folder}/pid; error_log stderr; worker_processes 1;
events {{ worker_connections 128; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 1h;
    location = / {{ default_type text/html; return 200 '{page}'; }}
    {locations}
  }}
}}
"""
# Headers of a location replace all of its server.
LOCATION = """
    location {prefix}/ {{
      proxy_pass {address}{uri}; proxy_set_header X-Forwarded-Prefix "{forwarded}";
      proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    }}"""


def why_not() -> str:
    """Why there can be no nginx; empty where there can."""
    return "" if shutil.which("nginx") else "no nginx: apt-get install --no-install-recommends nginx-light"


@contextmanager
def nginx(
    folder: Path, places: Mapping[str, str], *, removes_prefix: bool = True, page: str = ""
) -> Iterator[str]:
    """Its address; ``places`` are addresses by prefix.

    ``page`` is the HTML at its root. With ``removes_prefix`` it removes the prefix from the path, and sends
    ``X-Forwarded-Prefix``.
    """
    locations = "".join(
        LOCATION.format(
            prefix=prefix,
            address=address,
            uri="/" if removes_prefix else "",
            forwarded=prefix if removes_prefix else "",
        )
        for prefix, address in places.items()
    )
    folder.mkdir(exist_ok=True)
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, page=page, port=port, locations=locations))
    command = ["nginx", "-p", str(folder), "-c", str(config)]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + SECONDS
            while True:
                assert process.poll() is None, (folder / "log").read_text()
                try:
                    httpx.get(f"http://127.0.0.1:{port}/")
                    break
                except httpx.TransportError:
                    assert time.monotonic() < until
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
