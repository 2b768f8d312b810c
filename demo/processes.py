"""A federation of real processes on loopback: one hub, any number of contributors, gone when the block ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.end_together import end_together

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.2

Command = Sequence[str | Path]
Joiner = Callable[[str, str], Command]
"""Gives a contributor's command from the hub's address and fingerprint."""


def run_federation(
    folder: Path, joiners: Mapping[str, Joiner], on_round: Callable[[dict[str, Any]], None]
) -> float:
    """Run the hub in ``folder/hub`` and the contributors until all rounds are committed.

    Args:
        folder: Where every process has a log file ``NAME.log``.
        joiners: A command for every contributor, by name.
        on_round: Hears of every round that ended.

    Returns:
        Seconds from the first contributor's start to the hub's end.

    Raises:
        RuntimeError: When a process fails, naming its log.
    """
    end_together()
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        command: Command = [BIN / "gym-server", "run", "--dir", folder / "hub", "--json", "--exit-when-done"]
        hub = processes["hub"] = _start(folder, "hub", command)
        assert hub.stdout is not None
        event = json.loads(hub.stdout.readline() or _failed(folder, "hub"))
        began = time.monotonic()
        for name, join in joiners.items():
            processes[name] = _start(
                folder, name, join(f"{event['host']}:{event['port']}", event["fingerprint"])
            )
        for line in hub.stdout:
            on_round(json.loads(line))
        if hub.wait() != 0:
            _failed(folder, "hub")
        seconds = time.monotonic() - began
        for name, process in processes.items():
            if process.wait(timeout=60) != 0:
                _failed(folder, name)
        return seconds
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def ask(folder: Path, *arguments: str) -> Any:
    """The JSON answer of a gym-server command."""
    command: Command = [BIN / "gym-server", *arguments, "--dir", folder / "hub", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def join_command(folder: Path, name: str, address: str, fingerprint: str, *more: str | Path) -> Command:
    """`gym-client join` with its own home and ``NAME.jsonl`` as data."""
    trust = ["--server", address, "--fingerprint", fingerprint, "--yes"]
    own: Command = ["--home", folder / name, "--data", folder / f"{name}.jsonl", "--name", name]
    return [BIN / "gym-client", "join", *trust, *own, *more]


def _start(folder: Path, name: str, command: Command) -> subprocess.Popen[str]:
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE if name == "hub" else log,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        )


def _failed(folder: Path, name: str) -> str:
    log = folder / f"{name}.log"
    raise RuntimeError(f"{name} failed; the end of {log}:\n{log.read_text()[-1500:]}")
