"""Measure one transfer through a stock Flower 1.41 deployment on loopback, with TLS where it supports it."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from _processes import Measurement, Processes, moved
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gym_fed.core.library_env import VARIABLES

APP = Path(__file__).parent / "app"
FAST = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""The only polling interval that a stock deployment makes configurable (1 s by default)."""
ROLES = {
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNode",
    "flwr-serverapp": "ServerApp",
    "flwr-clientapp": "ClientApp",
}


def measure_flower(direction: str, megabytes: int) -> Measurement:
    """Move ``megabytes`` up (client to server) or down, and check that they arrived.

    The time is measured inside the ServerApp from the message to the reply. It includes the SuperNode's polling every
    three seconds and the start of the ClientApp's process, but not the start of SuperLink, SuperNode and ServerApp.
    """

    def run(processes: Processes, payload: Path, result: Path) -> None:
        settings = f'direction="{direction}" payload="{payload}" result="{result}"'
        start_federation(processes, APP, settings)

    return moved("Flower", direction, megabytes, role_of, run)


def start_federation(
    processes: Processes, app: Path, settings: str, nodes: int = 1, core: int | None = None
) -> psutil.Popen:
    """Start a SuperLink, SuperNodes and ``flwr run``, and return the SuperLink.

    Args:
        processes: Where they run.
        app: Folder of the Flower app.
        settings: Run config of the app, as ``key=value`` words.
        nodes: Number of SuperNodes.
        core: The core that the SuperLink is pinned to; None for all.
    """
    folder = processes.folder
    certificate, key = write_certificate(folder)
    port = free_port()
    address = f"127.0.0.1:{port}"
    home = folder / "flwr-home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "peer"\n\n[superlink.peer]\naddress = "{address}"\n'
        f'root-certificates = "{certificate}"\n'
    )
    copy = folder / "app"
    shutil.copytree(app, copy, ignore=shutil.ignore_patterns("__pycache__"))
    binaries = Path(sys.executable).parent
    environment = os.environ | VARIABLES | FAST
    environment |= {"FLWR_HOME": str(home), "PATH": f"{binaries}:{os.environ['PATH']}"}
    tls = [
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
        "--ssl-ca-certfile",
        str(certificate),
    ]
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    link = [*pinned, str(binaries / "flower-superlink"), *tls, "--host", "127.0.0.1", "--port", str(port)]
    node = [
        str(binaries / "flower-supernode"),
        "--root-certificates",
        str(certificate),
        "--superlink",
        address,
    ]
    superlink = processes.start("superlink", link, environment)
    processes.wait_for("SuperLink", lambda: is_listening(port), 120)
    for number in range(nodes):
        processes.start(f"supernode-{number}", [*node, "--port", str(free_port())], environment)
    run = [str(binaries / "flwr"), "run", str(copy), "peer", "--run-config", settings]
    processes.start("run", run, environment)
    return superlink


def role_of(command: Sequence[str]) -> str | None:
    """Return the name of the Flower process that a command line starts; None for other commands."""
    return next((ROLES[Path(word).name] for word in command[:3] if Path(word).name in ROLES), None)


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and its key as PEM files; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def free_port() -> int:
    """Return a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return True if a connection to the port is accepted."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
