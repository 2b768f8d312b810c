"""A hub as a real process, in a folder of its own, that can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import yaml
from gym_server.cli.main import app
from typer.testing import CliRunner

from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

BIN = Path(sys.executable).parent
QUICK_ENROLMENT = {"enrolment_work_bits": 4, "enrolments_per_minute": 6000}
"""Many contributors join from one address, and their proof of work takes no time."""


class HubProcess:
    """`gym-server run` on a free loopback port."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any] | None = None,
        base_model: str = "gym-nano",
        init: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        gym_server("init", "--dir", str(folder), "--enrolment", "open", "--base", base_model, *init)
        own = {"listen": "127.0.0.1:0", "limits": QUICK_ENROLMENT, "check": False}
        self.configure(_merged(own, config or {}))
        self.process: WarmProcess | subprocess.Popen[str] | None = None
        self.port = 0
        self.fingerprint = ""

    def configure(self, changes: dict[str, Any]) -> None:
        """Overwrite keys of the config file, deeply."""
        path = self.folder / "gym-server.yaml"
        path.write_text(yaml.safe_dump(_merged(yaml.safe_load(path.read_text()), changes)))

    def start(
        self, *arguments: str, failpoints: str = "", environment: dict[str, str] | None = None
    ) -> HubProcess:
        """Start and wait until it listens; the port stays the same over restarts.

        With ``environment`` it begins from nothing, so that a library which it preloads is there.
        """
        command = ["gym-server", "run", "--dir", str(self.folder), "--json", *arguments]
        with open(self.folder / "stderr.log", "ab") as log:
            if environment is None:
                env = {**os.environ, "GYM_FAILPOINTS": failpoints}
                self.process = WarmProcess(command, stdout=subprocess.PIPE, stderr=log, env=env)
            else:
                self.process = started_cold(command, environment, log, subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the hub did not start:\n{(self.folder / 'stderr.log').read_text()[-3000:]}"
        event = json.loads(line)
        self.port, self.fingerprint = event["port"], event["fingerprint"]
        self.configure({"listen": f"127.0.0.1:{self.port}"})
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=SECONDS)

    def wait_killed(self, seconds: float = 2 * SECONDS) -> None:
        """Wait until a failpoint has killed it."""
        assert self.process is not None
        assert self.process.wait(timeout=seconds) == -signal.SIGKILL

    def wait_done(self, seconds: float = 3 * SECONDS) -> None:
        """Wait for a run with --exit-when-done."""
        assert self.process is not None
        status = self.process.wait(timeout=seconds)
        assert status == 0, (self.folder / "stderr.log").read_text()[-3000:]

    def ask(self, *arguments: str) -> Any:
        """The JSON answer of a gym-server command on this folder."""
        return gym_server(*arguments, "--dir", str(self.folder))

    def wait_for(self, what: str, condition: Any, seconds: float = SECONDS) -> Any:
        """Poll ``condition()`` until it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.1)
        raise AssertionError(f"{what} did not happen in {seconds} s:\n{self.log()[-3000:]}")

    def log(self) -> str:
        return (self.folder / "stderr.log").read_text()

    def peak_memory_bytes(self) -> int:
        """High-water mark of the process's resident memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")


def gym_server(*arguments: str) -> Any:
    """Run a gym-server command with --json in this process, and return its answer.

    A process of its own would import the project again, which takes twenty times longer than most commands.
    """
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def started_cold(command: list[str], environment: dict[str, str], log: IO[bytes], stdout: Any) -> Any:
    """One of our commands in a process of its own, with its environment from the first instruction on."""
    command = [str(BIN / command[0]), *command[1:]]
    return subprocess.Popen(command, stdout=stdout, stderr=log, env=environment, text=True)


def start_client(
    home: Path,
    hub: HubProcess,
    *arguments: str,
    failpoints: str = "",
    environment: dict[str, str] | None = None,
    address: str = "",
) -> Any:
    """`gym-client join` as a process; its output goes to ``home/client.log``. ``environment``: as of ``start``."""
    home.mkdir(parents=True, exist_ok=True)
    command: Sequence[str] = [
        "gym-client",
        "join",
        "--server",
        address or hub.address,
        "--fingerprint",
        hub.fingerprint,
        "--home",
        str(home),
        "--yes",
        *arguments,
    ]
    variables = {"GYM_FAILPOINTS": failpoints, "OMP_NUM_THREADS": "1"}
    with open(home / "client.log", "ab") as log:
        if environment is not None:
            return started_cold([*command], {**environment, **variables}, log, log)
        return WarmProcess(command, stdout=log, stderr=log, env={**os.environ, **variables})


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new
