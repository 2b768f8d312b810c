"""An audit with real processes: two rounds, a contributor's answer, the check, and the coordinator's record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gym_client.identity.home import Home

from tests.support.hub import BIN, HubProcess
from tests.support.warm import run

CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 2, "min_contributors": 1},
    "recipe": {
        "finetuning": "lora",
        "lora": {"r": 2},
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "max_length": 32,
    },
    "codec": {"error_feedback": False},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "gate": {"screen_updates": False},
}


@pytest.mark.slow  # ten commands and a hub are processes
def test_an_update_of_the_second_round_is_answered_for_checked_and_recorded_by_commands(
    tmp_path: Path, tiny_base: Path
) -> None:
    auditor, contributor = Home.open(tmp_path / "auditor"), tmp_path / "contributor"
    audit = {"rows": "public", "rate": 1.0, "auditors": [auditor.key.contributor]}
    config = {**CONFIG, "rounds": {**CONFIG["rounds"], "audit": audit}}
    hub = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    rows = [{"instruction": f"double: {c}", "output": c * 2} for c in "abcdefgh"]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def client(home: Path, *words: str | Path) -> Any:
        command = [BIN / "gym-client", *words, "--server", hub.address, "--home", home, "--json"]
        done = run(command)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]) if words[0] == "join" else json.loads(done.stdout)

    for home, rounds in ((contributor, "2"), (auditor.folder, "1")):
        client(home, "join", "--yes", "--rounds", rounds, "--base", tiny_base, "--data", data)
    update = client(contributor, "audit", "list")[1]["update"]
    client(contributor, "audit", "answer", update, "--out", tmp_path / "answer")
    verdict = client(
        auditor.folder,
        *("audit", "check", update, tmp_path / "answer", "--base", tiny_base, "--data", data),
        *("--out", tmp_path / "verdict"),
    )
    assert (verdict["outcome"], verdict["reason"]) == ("passed", "")
    assert set(verdict["distances"].values()) == {0.0}
    recorded = run(
        [BIN / "gym-server", "audit", "record", tmp_path / "verdict", "--dir", hub.folder, "--json"]
    )
    assert recorded.returncode == 0, recorded.stderr
    assert json.loads(recorded.stdout)["kind"] == "audited"
    assert [draw["verdict"] for draw in client(contributor, "audit", "list")] == ["", "audited"]
    assert not (contributor / "audits" / update).exists()
    assert client(contributor, "rewards", "--verify")["verified"]
    assert hub.stop() == 0
