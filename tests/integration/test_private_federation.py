"""Two real rounds with noise at the contributor: shown before joining and after each, and stopped by its own limit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.hub import BIN, HubProcess
from tests.support.wait import SECONDS


@pytest.mark.slow
def test_a_contributor_sees_what_rounds_cost_and_stops_at_its_own_limit(
    tmp_path: Path, tiny_base: Path
) -> None:
    config = {
        "rounds": {"num_rounds": 2, "min_contributors": 1, "lease_seconds": 600},
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
        "recipe": {
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "max_length": 32,
            "privacy": {"noise_multiplier": 1.0},
        },
    }
    hub = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    home = tmp_path / "home"
    home.mkdir()
    rows = [{"instruction": f"double: {c}", "output": c * 2} for c in "abcdefghijklmnop"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "policy.yaml").write_text("max_epsilon: 3.0\n")
    command = [BIN / "gym-client", "join", "--server", hub.address, "--home", home, "--yes", "--json"]
    command += ["--base", tiny_base, "--data", tmp_path / "data.jsonl"]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert agent.stdout is not None
    events = []
    for line in agent.stdout:  # the second round is refused, and the agent waits for a task that it may do
        events.append(json.loads(line))
        if events[-1]["event"] == "failed":
            break
    agent.terminate()
    agent.communicate(timeout=SECONDS)
    (offer,) = [event["privacy"] for event in events if event["event"] == "offer"]
    assert 2.5 < offer["epsilon_per_round"] < 3.0 < offer["epsilon_after_all"]
    assert offer["central"] is None
    (after,) = [event for event in events if event["event"] == "privacy"]
    assert after["epsilon"] == after["epsilon_total"] == offer["epsilon_per_round"]
    assert events[-1]["event"] == "failed"
    assert "max_epsilon of 3" in events[-1]["message"]
    shown = subprocess.run(
        [BIN / "gym-client", "privacy", "--home", home, "--json"], capture_output=True, text=True
    )
    (row,) = json.loads(shown.stdout)
    assert row["epsilon"] == after["epsilon"]
    first = hub.ask("rounds")[0]
    assert sum(first["verdicts"].values()) == 1
    hub.stop()
