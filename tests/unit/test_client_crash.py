"""A contributor's process killed at its worst moments, against a real hub: nothing is lost, nothing is sent twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.support.hub import BIN, HubProcess


def test_kills_before_signing_before_submitting_and_after_lose_nothing(
    tmp_path: Path, tiny_base: Path
) -> None:
    config = {
        "rounds": {"num_rounds": 2, "min_contributors": 1, "lease_seconds": 600},
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
        "recipe": {"max_steps": 3, "per_device_train_batch_size": 2, "max_length": 32},
    }
    hub = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    home = tmp_path / "home"
    rows = [{"instruction": f"double: {c}", "output": c * 2} for c in "abcd"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def join(failpoint: str = "") -> subprocess.CompletedProcess[str]:
        command = [BIN / "gym-client", "join", "--server", hub.address, "--home", home, "--yes", "--json"]
        command += ["--rounds", "1", "--model", tiny_base, "--data", tmp_path / "data.jsonl"]
        environment = {**os.environ, "GYM_FAILPOINTS": failpoint}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def deltas() -> list[bytes]:
        return [path.read_bytes() for path in home.glob("tasks/*/finished.json")]

    assert join("client-encoded").returncode == -signal.SIGKILL
    assert deltas() == []
    assert join("client-before-submit").returncode == -signal.SIGKILL
    signed = deltas()
    assert len(signed) == 1
    assert join("client-after-submit").returncode == -signal.SIGKILL
    assert deltas() == signed
    assert not (home / "receipts.jsonl").exists()

    last = join()
    assert last.returncode == 0, last.stderr
    receipts = [json.loads(line) for line in (home / "receipts.jsonl").read_text().splitlines()]
    assert [(r["verdict"], r["group"]) for r in receipts] == [("admitted", "1")]
    assert deltas() == []
    rounds = hub.ask("rounds")
    assert sum(rounds[0]["verdicts"].values()) == 1
    assert hub.stop() == 0
