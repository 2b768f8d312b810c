"""What a run would need: `gym train --plan` in a child process, since it loads torch and times a few blocks."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.webui.plain import plain, text
from gym_fed.webui.workbench import Workbench

PLAN_SECONDS = 180
"""A plan of a model of billions of weights takes some tens of seconds."""


class Planner:
    """Plans one run at a time.

    Args:
        workbench: Where the command runs.
    """

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._busy = threading.Lock()

    def plan(self, yaml_text: str) -> dict[str, Any]:
        """The plan of a text, as ``gym train --plan --json`` prints it.

        Raises:
            GymError: ``BUSY`` while another is made; the command's own error; ``DEADLINE_EXCEEDED``.
        """
        if not self._busy.acquire(blocking=False):
            raise GymError(ErrorCode.BUSY, "another estimate is being made", "try again in a moment")
        try:
            with tempfile.TemporaryDirectory(prefix="gym-plan-") as folder:
                file = Path(folder) / "config.yaml"
                file.write_bytes(yaml_text.encode("utf-8", "replace"))
                return self._run(file)
        finally:
            self._busy.release()

    def _run(self, file: Path) -> dict[str, Any]:
        command = module_command("gym_fed.cli.main", "train", file, "--plan", "--json")
        try:
            done = subprocess.run(
                command,
                cwd=self._workbench.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PLAN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GymError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"the estimate took more than {PLAN_SECONDS} s",
                "make it in a terminal: gym train --plan",
            ) from error
        refused = GymError.last_in(done.stderr) if done.returncode else None
        if refused is not None:
            message = text(refused.message).replace(f"{file.parent}/", "")
            raise GymError(refused.code, message, text(refused.hint))
        try:
            found = json.loads(done.stdout)
        except ValueError as error:
            raise GymError(ErrorCode.INTERNAL, f"the estimate ended with code {done.returncode}") from error
        result: dict[str, Any] = plain(found)
        return result
