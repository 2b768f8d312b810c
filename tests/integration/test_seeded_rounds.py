"""Two contributors without the base join a hub that allows seeding: the hub sends one base, and both are merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from gym_client.identity.home import Home
from gym_client.seeding.store import SeedingTotals

from tests.integration.test_base_from_hub import CONFIG, log_of, private_base  # noqa: F401 (a fixture)
from tests.support.hub import HubProcess, gym_server, start_client
from tests.support.wait import SECONDS
from tests.support.warm import run

SEEDING = {"listen": "127.0.0.1:0", "max_bytes_per_second": 1 << 28}


@pytest.mark.slow  # three starts of processes
def test_the_second_contributor_gets_the_base_and_its_soups_from_the_first(
    tmp_path: Path,
    private_base: Path,  # noqa: F811
) -> None:
    rounds = {**CONFIG["rounds"], "num_rounds": 2, "min_contributors": 2, "grace_max_seconds": 100}
    changes = {"rounds": rounds, "seeding": {"min_bytes": 100_000, "hub_copies": 1}}
    hub = HubProcess(tmp_path / "hub", {**CONFIG, **changes}, str(private_base))
    hub.start("--exit-when-done")
    first, second = tmp_path / "first", tmp_path / "second"
    for home in (first, second):
        home.mkdir()
        (home / "policy.yaml").write_text(yaml.safe_dump({"seeding": SEEDING}))
    one = start_client(first, hub)
    hub.wait_for("the first base", lambda: "waiting for a task" in log_of(first))
    two = start_client(second, hub)
    hub.wait_for("the second base", lambda: "waiting for a task" in log_of(second), 2 * SECONDS)
    hub.wait_for("a soup", lambda: gym_server("rounds", "--dir", str(hub.folder))[0]["state"] == "committed")
    status = run(["gym-client", "status", "--server", hub.address, "--home", str(second), "--json"])
    hub.wait_done()
    assert [client.wait(timeout=2 * SECONDS) for client in (one, two)] == [0, 0], log_of(second)
    for home in (first, second):
        assert "can learn this machine's address" in log_of(home)
    assert "came from another contributor" in log_of(second)
    weights = (private_base / "model.safetensors").stat().st_size
    served, received = SeedingTotals(Home.open(first)).now, SeedingTotals(Home.open(second)).now
    assert served.served >= weights
    assert received.received >= weights
    assert json.loads(status.stdout)["seeding"].keys() == {"received", "served", "day", "served_on_day"}
    assert not (first / "seeds").exists()
