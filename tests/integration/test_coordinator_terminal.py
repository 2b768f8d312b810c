"""`gym-server run` prints what happens in a federation of real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.federation import Federation
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess


def test_a_hub_prints_who_joins_trains_and_is_judged_and_the_loss(tmp_path: Path, tiny_base: Path) -> None:
    federation = Federation(tmp_path, tiny_base, rounds={"num_rounds": 1, "min_contributors": 2})
    hub = federation.hub
    with open(hub.folder / "stderr.log", "ab") as log:
        command = ["gym-server", "run", "--dir", hub.folder, "--json", "--events", "--exit-when-done"]
        hub.process = WarmProcess(command, stdout=subprocess.PIPE, stderr=log)
    assert hub.process.stdout is not None
    try:
        first = json.loads(hub.process.stdout.readline())
        hub.port, hub.fingerprint = first["port"], first["fingerprint"]
        for name in ("ann", "bob"):
            federation.join(name)
        events = [json.loads(line) for line in hub.process.stdout]
        assert hub.process.wait(timeout=SECONDS) == 0
    finally:
        federation.close()
    assert sorted(e["name"] for e in events if e["event"] == "joined") == ["ann", "bob"]
    assert {e["name"] for e in events if e["event"] == "verdict" and e["verdict"] == "merged"} == {
        "ann",
        "bob",
    }
    assert [e["version"] for e in events if e["event"] == "version"] == [1]
    assert "self-reported" in next(e["source"] for e in events if e["event"] == "version")
    assert [e["state"] for e in events if e["event"] == "round"] == ["committed"]
