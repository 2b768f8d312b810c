"""A contributor stopped, then killed at its worst moments, against a real hub: nothing is lost or sent twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.support.hub import BIN, HubProcess


def test_ctrl_c_in_training_and_kills_around_the_submission_lose_nothing(
    tmp_path: Path, tiny_base: Path
) -> None:
    config = {
        "rounds": {"num_rounds": 2, "min_contributors": 1, "lease_seconds": 600},
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
        "recipe": {"max_steps": 40, "per_device_train_batch_size": 2, "max_length": 32},
    }
    hub = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    home = tmp_path / "home"
    rows = [{"instruction": f"double: {c}", "output": c * 2} for c in "abcd"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    command = [BIN / "gym-client", "join", "--server", hub.address, "--home", home, "--yes", "--json"]
    command += ["--rounds", "1", "--model", tiny_base, "--data", tmp_path / "data.jsonl"]

    def join(failpoint: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "GYM_FAILPOINTS": failpoint}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def deltas() -> list[bytes]:
        return [path.read_bytes() for path in home.glob("tasks/*/finished.json")]

    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while '"phase": "train"' not in first.stdout.readline():
        assert first.poll() is None
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "same command" in told
    assert list(home.glob("tasks/*/run/checkpoints/checkpoint-*"))

    killed = join("client-before-submit")
    assert killed.returncode == -signal.SIGKILL
    steps = [json.loads(line)["done"] for line in killed.stdout.splitlines() if '"phase": "train"' in line]
    assert steps[0] > 1
    assert steps[-1] == 40
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
