"""Callers that name another host write no raw lines of gRPC's core into a hub's log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SERVE = """
import socket, ssl, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
sys.argv = ["gym-server", "--version"]
from gym_server.cli.main import main
try:
    main()
except SystemExit:
    pass
import grpc
key, certificate = (Path(name).read_bytes() for name in ("key.pem", "certificate.pem"))
server = grpc.server(ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
server.start()
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
with context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost"):
    time.sleep(0.5)
server.stop(None).wait()
"""


def test_a_caller_that_names_another_host_writes_no_line_of_grpc(tmp_path: Path) -> None:
    from gym_fed.trust.identity.tls import create_certificate

    create_certificate(tmp_path / "key.pem", tmp_path / "certificate.pem")
    # Flower, which another test may have imported in this process, sets the variable for all its children.
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", _SERVE],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
