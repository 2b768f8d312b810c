"""Measure one round between a contributor and a hub on loopback, over gRPC with TLS."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from _processes import Measurement, Processes, moved

BINARIES = Path(sys.executable).parent
SERVER, CLIENT = (Path(__file__).with_name(name) for name in ("server.py", "client.py"))


def measure_gym(direction: str, megabytes: int) -> Measurement:
    """Move ``megabytes`` up (client to server) or down, and check that they arrived.

    The time is measured inside the ServerApp around ``send_and_receive``, as for the peer. It includes the task, its
    stream and lease, the checksums at both ends, the acknowledged write to disk, and the grid's polling.
    """

    def run(processes: Processes, payload: Path, result: Path) -> None:
        folder = processes.folder
        make_hub(processes, folder)
        log = folder / "hub.log"
        command = [sys.executable, str(SERVER), str(folder / "hub"), direction, str(payload), str(result)]
        processes.start("hub", command, os.environ)
        processes.wait_for("hub", lambda: '"fingerprint"' in log.read_text(), 60)
        event = next(json.loads(line) for line in log.read_text().splitlines() if '"fingerprint"' in line)
        where = [str(folder / "home"), f"127.0.0.1:{event['port']}", event["fingerprint"]]
        processes.start("client", [sys.executable, str(CLIENT), *where], os.environ)

    return moved("gym-fed", direction, megabytes, role_of, run)


def make_hub(processes: Processes, folder: Path) -> None:
    """Create a hub with open enrolment on a free loopback port."""
    init = [str(BINARIES / "gym-server"), "init", "--dir", str(folder / "hub"), "--enrolment", "open"]
    made = processes.start("init", init, os.environ)
    processes.wait_for("hub folder", lambda: made.poll() == 0, 60)
    file = folder / "hub" / "gym-server.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"listen": "127.0.0.1:0"}))


def role_of(command: Sequence[str]) -> str | None:
    """Return "hub" or "client" for a command line that starts one; None for other commands."""
    return {str(SERVER): "hub", str(CLIENT): "client"}.get(command[1] if len(command) > 1 else "")
