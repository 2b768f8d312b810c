"""Debian's Prometheus, as a process of the tests' own with a config, rules and a port of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.ports import free_port
from tests.support.wait import until

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no prometheus or promtool (Debian: apt-get install --no-install-recommends prometheus)",
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; its output is in the result."""
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


class PrometheusServer:
    """Started by making it; close it at the end.

    Args:
        folder: A new folder for its files.
        jobs: ``scrape_configs``.
        rules: Path of the rules.
    """

    def __init__(self, folder: Path, jobs: list[dict[str, Any]], rules: Path) -> None:
        folder.mkdir()
        config = {
            # A busy machine answers late, and a scrape that fails makes every series end.
            "global": {"scrape_interval": "10s", "scrape_timeout": "10s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        until(self._is_ready, "Prometheus is ready")

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", (expression, answer)
        return list(answer["data"]["result"])

    def targets(self) -> dict[str, str]:
        """The health of each job's target, with its last error."""
        found = httpx.get(f"{self.url}/api/v1/targets").json()["data"]["activeTargets"]
        return {one["labels"]["job"]: f"{one['health']} {one['lastError']}".strip() for one in found}

    def alerts(self) -> dict[str, str]:
        """The state of each active alert."""
        found = httpx.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"]
        return {one["labels"]["alertname"]: one["state"] for one in found}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
