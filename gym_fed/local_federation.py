"""Run a federation as processes on this machine: one hub and any number of contributors, which end with the call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gym_fed.core.child_process import run_process, start_process
from gym_fed.core.errors import ErrorCode, GymError

BIN = Path(sys.executable).parent
"""Folder of this installation's commands."""
Command = Sequence[str | Path]
Joiner = Callable[[str, str], Command]
"""Returns a contributor's command, given the hub's address and fingerprint."""


def run_federation(
    folder: Path,
    joiners: Mapping[str, Joiner],
    on_round: Callable[[dict[str, Any]], None],
    *,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> float:
    """Run the hub in ``folder/hub`` and the contributors until all rounds are committed.

    Args:
        folder: Folder of the hub, and of a log file ``NAME.log`` per process.
        joiners: Functions that return the contributors' commands, by name.
        on_round: Called with the event of every round that ended.
        settings: Overrides of the hub's config for this run, as ``a.b=value``.
        environment: Environment variables for all processes, in addition to this process's.

    Returns:
        Seconds from the first contributor's start to the hub's end.

    Raises:
        GymError: ``ROUND_ABORTED`` with the log of a failed process; ``MISSING_DEPENDENCY`` if a command is missing.
    """
    processes: dict[str, subprocess.Popen[str]] = {}

    def start(name: str, command: Command) -> None:
        require_command(command)
        with open(folder / f"{name}.log", "w", encoding="utf-8") as log:
            processes[name] = start_process(
                command,
                passphrases=True,
                stdin=None,
                stdout=subprocess.PIPE if name == "hub" else log,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    try:
        start("hub", [*hub_command(folder, settings), "--json"])
        hub = processes["hub"]
        assert hub.stdout is not None
        event = json.loads(hub.stdout.readline() or _failed(folder, "hub"))
        began = time.monotonic()
        for name, join in joiners.items():
            start(name, join(f"{event['host']}:{event['port']}", event["fingerprint"]))
        for line in hub.stdout:
            event = json.loads(line)
            if event["event"] == "round":
                on_round(event)
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


def require_command(command: Command) -> None:
    """Reject a command that is not installed, for example if only the source folder is on the Python path.

    Raises:
        GymError: ``MISSING_DEPENDENCY``.
    """
    if shutil.which(command[0]) is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{command[0]}: no such command",
            f"install the package for {sys.executable}, which creates its commands (docs/install.md)",
        )


def ask(folder: Path, *arguments: str) -> Any:
    """Run a gym-server command and return its JSON output."""
    command: Command = [BIN / "gym-server", *arguments, "--dir", folder / "hub", "--json"]
    require_command(command)
    done = run_process(command, passphrases=True, stdin=None, text=True)
    if done.returncode:
        raise GymError.last_in(done.stderr) or GymError(
            ErrorCode.INTERNAL, f"{command[0]}: code {done.returncode}"
        )
    return json.loads(done.stdout)


def hub_command(folder: Path, settings: Sequence[str] = ()) -> Command:
    """Return the `gym-server run` command that exits when all rounds are committed."""
    overrides = [word for setting in settings for word in ("--set", setting)]
    return [BIN / "gym-server", "run", "--dir", folder / "hub", "--exit-when-done", *overrides]


def join_command(folder: Path, name: str, address: str, fingerprint: str, *more: str | Path) -> Command:
    """Return the `gym-client join` command with its own home and ``NAME.jsonl`` as data."""
    trust = ["--server", address, "--fingerprint", fingerprint, "--yes"]
    own: Command = ["--home", folder / name, "--data", folder / f"{name}.jsonl", "--name", name]
    return [BIN / "gym-client", "join", *trust, *own, *more]


def _failed(folder: Path, name: str) -> NoReturn:
    log = folder / f"{name}.log"
    end = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    raise GymError(ErrorCode.ROUND_ABORTED, f"{name} failed; the end of {log}:\n{end}")
