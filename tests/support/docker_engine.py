"""A Docker engine of the tests' own: Debian's dockerd, in a network namespace that keeps its bridges and rules."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.wait import SECONDS, until

_PROGRAMS = ("dockerd", "docker", "runc", "unshare", "nsenter", "ip", "iptables", "curl")


def why_not() -> str:
    """Why no engine can be started here; empty if it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if not _compose_words():
        absent.append("docker-compose")
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: docker.io, docker-compose, iproute2, iptables, curl)"
    return "" if os.geteuid() == 0 else "only root can start a Docker engine"


def _compose_words() -> list[str]:
    """Return the command of Compose, the plugin's if both are there."""
    if (
        shutil.which("docker")
        and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


class DockerEngine:
    """Started by making it; ``close`` stops every container and the engine.

    Args:
        folder: A new folder for the engine's images, volumes and socket. Its path has at most 60 characters, since
            that of a socket is short.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._socket = folder / "sock"
        self._log = folder / "log"
        places = ["--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid"]
        words = ["dockerd", *map(str, places), "--host", f"unix://{self._socket}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "engine", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._environment = {**os.environ, "DOCKER_HOST": f"unix://{self._socket}"}
        until(self._is_ready, "the Docker engine answers")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-3000:]
        return self._socket.exists() and self.call("docker", "info").returncode == 0

    def call(
        self, *words: str, cwd: Path | None = None, seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the engine's network, where the ports of containers are published."""
        return subprocess.run(
            ["nsenter", "--target", str(self._process.pid), "--net", *words],
            cwd=cwd,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def run(self, *words: str, cwd: Path | None = None, seconds: float = SECONDS) -> str:
        """Return what a command prints.

        Raises:
            AssertionError: If it fails.
        """
        done = self.call(*words, cwd=cwd, seconds=seconds)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def close(self) -> None:
        if names := self.run("docker", "ps", "-aq").split():
            self.run("docker", "rm", "-f", "-v", *names)
        self._process.terminate()
        self._process.wait(SECONDS)


class ComposeProject:
    """A compose file's services on an engine.

    Args:
        engine: The engine that has the images.
        folder: Folder of ``compose.yaml``.
        name: The project's name, as the file says.
    """

    def __init__(self, engine: DockerEngine, folder: Path, name: str) -> None:
        self._engine, self._folder, self._name = engine, folder, name
        self._words = _compose_words()
        if self._words == [
            "docker-compose"
        ]:  # the first Compose does not know the file's name for the project
            file = folder / "compose.yaml"
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(line for line in lines if not line.startswith("name:")))

    def __call__(self, *words: str, seconds: float = SECONDS) -> str:
        """Return what a command of Compose prints.

        Raises:
            AssertionError: If it fails.
        """
        return self._engine.run(*self._words, "-p", self._name, *words, cwd=self._folder, seconds=seconds)

    def inspect(self, service: str, template: str) -> str:
        """Return a fact of a service's container, by a Go template."""
        (container,) = (
            self("ps", "-q", "-a", service).split()
            if self._words != ["docker-compose"]
            else self("ps", "-q", service).split()
        )
        return self._engine.run("docker", "inspect", "-f", template, container).strip()

    def is_healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}") == "healthy"
