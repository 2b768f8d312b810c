"""Ctrl-C against a real hub: the round goes on at the checkpoint. (Kills at every line: tests/crash.)"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.hub import BIN, HubProcess
from tests.support.wait import SECONDS
from tests.support.warm import run


@pytest.mark.slow  # two runs of a process; tests/crash kills one too
def test_ctrl_c_in_training_stops_at_a_checkpoint_and_the_same_command_goes_on(
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
    command += ["--rounds", "1", "--base", tiny_base, "--data", tmp_path / "data.jsonl"]

    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while '"phase": "train"' not in first.stdout.readline():
        assert first.poll() is None
    first.send_signal(signal.SIGINT)
    _, printed = first.communicate(timeout=SECONDS)
    assert first.returncode == 130
    assert "same command" in printed
    assert list(home.glob("tasks/*/run/checkpoints/checkpoint-*"))

    again = run(command)
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["done"] for line in again.stdout.splitlines() if '"phase": "train"' in line]
    assert steps[0] > 1
    assert steps[-1] == 40
    receipts = [json.loads(line) for line in (home / "receipts.jsonl").read_text().splitlines()]
    assert [(r["verdict"], r["group"]) for r in receipts if "verdict" in r] == [("admitted", "1")]
    assert list(home.glob("tasks/*")) == []
    rounds = hub.ask("rounds")
    assert sum(rounds[0]["verdicts"].values()) == 1
    assert hub.stop() == 0
