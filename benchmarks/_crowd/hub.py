"""The hub under load: a process on its own core, which is measured, killed and restarted."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from gym_fed.trust.identity.tls import fingerprint

BINARIES = Path(sys.executable).parent
_READY_SECONDS = 600.0


@dataclass(frozen=True)
class Sample:
    """A sample of the hub's process.

    ``cpu_seconds`` is the CPU time of all hub processes since the crowd started.
    """

    at_seconds: float
    memory_bytes: int
    cpu_seconds: float
    files: int
    threads: int
    wal_bytes: int
    database_bytes: int


class CrowdHub:
    """A ``gym-server run`` process in a folder, configured for many members behind one address.

    Args:
        folder: The hub's folder, which is created if needed.
        base_model: Name or folder of the base model.
        config: Sections of the config.
        core: CPU core that the hub is pinned to; None for all cores.
        environment: Further environment variables, such as the credentials of an object store.
    """

    def __init__(
        self,
        folder: Path,
        base_model: str,
        config: dict[str, Any],
        core: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.samples: list[Sample] = []
        self.database = str(config.get("storage", {}).get("database", "sqlite:///hub.db"))
        self._core, self._environment = core, {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._process: psutil.Popen | None = None
        self._began, self._cpu_before = time.monotonic(), 0.0
        if not folder.exists():
            init = ["init", "--dir", str(folder), "--enrolment", "open", "--base", base_model]
            subprocess.run(self._command(*init), check=True, capture_output=True, env=self._environment)
            self.configure({"listen": "127.0.0.1:0", **config})

    def configure(self, sections: dict[str, Any]) -> None:
        """Overwrite sections of the config."""
        file = self.folder / "gym-server.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **sections}))

    def __enter__(self) -> CrowdHub:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running():
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return int(self._process.pid)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        """Start the hub and wait until it listens; the port stays the same after restarts."""
        pinned = [] if self._core is None else ["taskset", "-c", str(self._core)]
        events = self.folder / "events.jsonl"
        with events.open("wb") as out, (self.folder / "hub.log").open("ab") as log:
            command = [*pinned, *self._command("run", "--dir", str(self.folder), "--json", *arguments)]
            self._process = psutil.Popen(command, stdout=out, stderr=log, env=self._environment)
        end = time.monotonic() + _READY_SECONDS
        while not (lines := events.read_text().splitlines()):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the hub did not start:\n{self.log()[-3000:]}")
            time.sleep(0.05)
        self.port = int(json.loads(lines[0])["port"])
        self.configure({"listen": self.address})
        self.certificate = ssl.get_server_certificate(("127.0.0.1", self.port)).encode()
        self.tls = fingerprint(self.certificate)

    def kill(self) -> None:
        """Kill the hub with SIGKILL, to simulate a crash."""
        assert self._process is not None
        self._cpu_before += self._cpu()
        self._process.kill()
        self._process.wait()

    def stop(self) -> int | None:
        """Stop the hub with SIGTERM; return its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        status: int | None = self._process.wait(timeout=_READY_SECONDS)
        return status

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return (self.folder / "hub.log").read_text(errors="replace")

    def ask(self, *arguments: str) -> Any:
        """Run a `gym-server` command on the hub's folder; return its JSON output."""
        command = self._command(*arguments, "--dir", str(self.folder), "--json")
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        if done.returncode:
            raise RuntimeError(f"gym-server {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
        return json.loads(done.stdout)

    def restored(self, folder: Path, place: str, database: str, objects: str) -> CrowdHub:
        """Restore the newest backup at ``place`` into a new folder, an empty database and another object store."""
        command = self._command("restore", "--from", place, "--dir", str(folder), "--database", database)
        subprocess.run(
            [*command, "--objects", objects], check=True, env=self._environment, capture_output=True
        )
        return CrowdHub(folder, "", {"storage": {"database": database}}, environment=self._environment)

    async def sample(self, every_seconds: float) -> None:
        """Sample the process until it is cancelled."""
        while True:
            if self.is_running():
                with suppress(psutil.Error, OSError):  # it was killed in the meantime
                    self.samples.append(self.now())
            await asyncio.sleep(every_seconds)

    def now(self) -> Sample:
        """Return a sample of the current state."""
        assert self._process is not None
        database = self.folder / "hub.db"
        wal = database.with_name("hub.db-wal")
        with self._process.oneshot():
            return Sample(
                time.monotonic() - self._began,
                int(self._process.memory_info().rss),
                self._cpu_before + self._cpu(),
                self._process.num_fds(),
                self._process.num_threads(),
                wal.stat().st_size if wal.exists() else 0,
                database.stat().st_size if database.exists() else 0,
            )

    def _cpu(self) -> float:
        assert self._process is not None
        times = self._process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)

    def _command(self, *arguments: str) -> list[str]:
        return [str(BINARIES / "gym-server"), *arguments]
