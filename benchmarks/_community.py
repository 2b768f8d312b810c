"""A hub and its contributors as real processes over gRPC with TLS, for ``pace.py`` and ``idle.py``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from _processes import Processes

_START_SECONDS = 600.0
_OVER = re.compile(r"INFO round \d+ (?:committed|aborted)")


class Community:
    """A hub and its contributors, whose processes are stopped with ``processes``; all files are in ``folder``.

    Args:
        processes: The processes under measurement.
        folder: An empty folder.
        base_model: Folder of the base model.
        config: Keys of the hub's config, merged recursively.
        tree: Source tree of another version to run; None for the installed version.
    """

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        base_model: Path,
        config: dict[str, Any],
        tree: Path | None = None,
    ) -> None:
        self._processes, self._folder, self._base = processes, folder, str(base_model)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if tree is not None:
            parts = (tree, *(tree / part for part in ("server", "client", "quant")))
            self._environment["PYTHONPATH"] = os.pathsep.join(str(part.resolve()) for part in parts)
        self._hub, self.log = folder / "hub", folder / "hub.log"
        init = ["init", "--dir", str(self._hub), "--base", self._base, "--enrolment", "open", "--yes"]
        processes.start("init", _command("server", *init), self._environment).wait()
        own = {"listen": "127.0.0.1:0", "limits": {"enrolment_work_bits": 4, "enrolments_per_minute": 6000}}
        path = self._hub / "gym-server.yaml"
        values = yaml.safe_load(path.read_text())
        for key, value in {**own, **config}.items():
            values[key] = {**(values.get(key) or {}), **value} if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump(values))
        run = _command("server", "run", "--dir", str(self._hub), "--json")
        self.hub = processes.start("hub", run, self._environment)
        processes.wait_for("hub", lambda: bool(self._listening()), _START_SECONDS)

    def join(self, name: str, rows: Sequence[dict[str, Any]], policy: dict[str, Any]) -> psutil.Popen:
        """Start a contributor with these rows and this ``policy.yaml``."""
        home, data, event = self._folder / name, self._folder / f"{name}.jsonl", self._listening()
        home.mkdir()
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (home / "policy.yaml").write_text(yaml.safe_dump(policy))
        where = ["--server", f"127.0.0.1:{event['port']}", "--fingerprint", str(event["fingerprint"])]
        own = ["--home", str(home), "--name", name, "--data", str(data), "--base", self._base, "--yes"]
        return self._processes.start(name, _command("client", "join", *where, *own), self._environment)

    @property
    def num_rounds(self) -> int:
        """Number of rounds that have ended."""
        return len(_OVER.findall(self.log.read_text()))

    def wait_for_rounds(self, number: int, seconds: float) -> list[dict[str, Any]]:
        """Wait until ``number`` rounds have ended; return them with their updates."""
        self._processes.wait_for(f"{number} rounds", lambda: self.num_rounds >= number, seconds)
        return list(json.loads(self.ask("rounds", "--json"))[:number])

    def ask(self, *words: str) -> str:
        """Run a `gym-server` command on the hub's folder; return its output."""
        return subprocess.run(
            _command("server", *words, "--dir", str(self._hub)),
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            check=True,
            text=True,
        ).stdout

    def _listening(self) -> dict[str, Any]:
        """Return the hub's first event, which has its port and fingerprint; empty before the hub listens."""
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            if line.startswith("{") and "port" in (event := json.loads(line)):
                return dict(event)
        return {}


def _command(role: str, *words: str) -> list[str]:
    return [sys.executable, "-c", f"from gym_{role}.cli.main import app; app()", *words]
