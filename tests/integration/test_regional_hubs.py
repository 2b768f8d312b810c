"""Two regional hubs, each a contributor of a root hub: real processes, one of them killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hub import gym_server
from tests.support.regions import Regions
from tests.support.wait import SECONDS

pytestmark = pytest.mark.slow  # three hubs, four members and two agents, for several rounds


def test_two_regions_improve_the_root_and_both_ledgers_verify_though_a_region_is_killed(
    tmp_path: Path,
) -> None:
    regions = Regions(tmp_path, ("north", "south"))
    try:
        for name in regions.hubs:
            regions.add_members(name)
            regions.join_root(name)
        north = regions.hubs["north"]
        north.wait_for("a regional round", lambda: "committed" in _states(north), 4 * SECONDS)
        north.kill()
        north.start()
        regions.wait_finished()
        root = regions.root
        history = [found for found in root.ask("rounds") if found["state"] == "committed"]
        assert len(history) == 2
        for found in history:
            assert {(u["name"], u["verdict"]) for u in found["updates"]} == {
                ("north", "merged"),
                ("south", "merged"),
            }
        assert history[-1]["heldout_after"] < history[0]["heldout_before"] - 0.2

        root.ask("ledger", "verify")
        exported = tmp_path / "root.jsonl"
        gym_server("ledger", "export", str(exported), "--dir", str(root.folder))
        for name, hub in regions.hubs.items():
            hub.wait_for("the region's end", lambda hub=hub: "the root has no more rounds" in hub.log())
            checked = hub.ask("ledger", "verify", "--root-ledger", str(exported))
            assert checked["root updates"] == 2, name
            assert checked["root versions"] == 3, "the base and two versions"
            final = hub.ask("ledger", "show", "--kind", "root-version")[-1]["body"]
            assert final["version"] == history[-1]["digest"]
            assert hub.ask("status")["version"] == final["height"], "members get the root's last version"
            own = tmp_path / f"{name}.jsonl.export"
            gym_server("ledger", "export", str(own), "--dir", str(hub.folder))
            outside = gym_server("ledger", "verify", "--ledger", str(own), "--root-ledger", str(exported))
            assert outside["root updates"] == 2
    finally:
        regions.close()


def _states(hub: object) -> set[str]:
    return {found["state"] for found in hub.ask("rounds")}  # type: ignore[attr-defined]
