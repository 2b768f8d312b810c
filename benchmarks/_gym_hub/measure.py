"""Times one transfer between a contributor and a hub on loopback, over gRPC with TLS."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from _processes import Measurement, Processes

BINARIES = Path(sys.executable).parent
CLIENT = Path(__file__).with_name("client.py")
MEGABYTE = 1_000_000


def measure_gym(direction: str, megabytes: int) -> Measurement:
    """Move ``megabytes`` of random bytes between a client and the hub and check that they arrived.

    The seconds are taken inside the client: TLS, enrolment, session, the transfer, both ends' checksum, and the
    write to disk that is acknowledged. The start of the two processes is not in them.

    Args:
        direction: ``up`` (client to server) or ``down``.
        megabytes: Size of the payload in 10**6 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="gym-hub-") as name:
        folder = Path(name)
        payload = folder / "payload"
        payload.write_bytes(os.urandom(megabytes * MEGABYTE))
        digest = hashlib.sha256(payload.read_bytes()).hexdigest()
        make_hub(folder)
        if direction == "down":
            run(folder, "up", str(payload))  # what is to be fetched must be there first; not measured
            told, peaks = run(folder, "down", digest, str(megabytes * MEGABYTE))
        else:
            told, peaks = run(folder, "up", str(payload))
        stored = list((folder / "hub").rglob(digest))
        if told["sha256"] != digest or [f.stat().st_size for f in stored] != [megabytes * MEGABYTE]:
            raise RuntimeError(
                f"the hub holds {stored}, the client reports {told}; sent {megabytes} MB of {digest}"
            )
        return Measurement("gym-fed", direction, megabytes, told["seconds"], peaks)


def make_hub(folder: Path) -> None:
    """A hub with open enrolment on a free port of loopback."""
    with Processes(folder, role_of) as processes:
        command = [str(BINARIES / "gym-server"), "init", "--dir", str(folder / "hub"), "--enrolment", "open"]
        init = processes.start("init", command, os.environ)
        processes.wait_for("hub folder", lambda: init.poll() == 0, 60)
    file = folder / "hub" / "gym-server.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"listen": "127.0.0.1:0"}))


def run(folder: Path, direction: str, *what: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Start the hub and a client, let the client do its transfer; its report, and the peaks by role."""
    result = folder / f"{direction}.json"
    with Processes(folder, role_of) as processes:
        log = folder / "hub.log"
        hub = [str(BINARIES / "gym-server"), "run", "--dir", str(folder / "hub"), "--json"]
        processes.start("hub", hub, os.environ)
        processes.wait_for("hub", lambda: '"fingerprint"' in log.read_text(), 60)
        event = next(json.loads(line) for line in log.read_text().splitlines() if '"fingerprint"' in line)
        where = [f"127.0.0.1:{event['port']}", event["fingerprint"], str(folder / f"home-{direction}")]
        if direction == "down":
            where[2] = str(folder / "home-up")  # an object is read by who brought it
        client = [sys.executable, str(CLIENT), direction, *where, str(result), *what]
        processes.start("client", client, os.environ)
        processes.wait_for("result", result.exists, 300)
    return json.loads(result.read_text()), dict(processes.peak_rss_mb)


def role_of(command: Sequence[str]) -> str | None:
    """Which of the two a command line belongs to."""
    if str(CLIENT) in command:
        return "client"
    return (
        "hub" if "run" in command and any(Path(word).name == "gym-server" for word in command[:3]) else None
    )
