"""Run a command in a child process and read its JSON output."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.webui.jobs import PROGRAMS


def json_of(command: Sequence[str], folder: Path, seconds: float) -> Any:
    """Return the JSON that a command prints with ``--json``.

    Args:
        command: The program, a key of ``PROGRAMS``, and its arguments without ``--json``.
        folder: The working folder.
        seconds: The time limit.

    Raises:
        GymError: The command's own error; ``DEADLINE_EXCEEDED``; ``INTERNAL`` if it prints no JSON.
    """
    name = " ".join(word for word in command if not Path(word).is_absolute())
    try:
        done = subprocess.run(
            module_command(PROGRAMS[command[0]], *command[1:], "--json"),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GymError(
            ErrorCode.DEADLINE_EXCEEDED,
            f"{name} took more than {seconds:g} s",
            f"run it in a terminal: {name}",
        ) from error
    refusal = GymError.last_in(done.stderr) if done.returncode else None
    if refusal is not None:
        raise refusal
    failure = GymError(ErrorCode.INTERNAL, f"{name} ended with code {done.returncode}")
    if done.returncode:
        raise failure
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise failure from error
