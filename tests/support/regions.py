"""A root hub and regional hubs with their members and agents, all as real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gym_fed.data.generated import generate
from tests.support.hub import HubProcess, start_client
from tests.support.wait import SECONDS

TASK = "shout"
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 2, "min_contributors": 2, "deadline_seconds": 240, "lease_seconds": 6},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 8, "per_device_train_batch_size": 8, "max_length": 64, "learning_rate": 3.0e-3},
}
GATE = {"heldout": f"task:{TASK}", "max_examples": 40}


class Regions:
    """A root and its regions; ``close`` ends them all.

    Args:
        folder: Folder of all of them.
        names: Names of the regions.
        root_rounds: Number of the root's rounds.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], root_rounds: int = 2) -> None:
        self.folder, self.clients = folder, dict[str, Any]()
        rounds = {**CONFIG["rounds"], "num_rounds": root_rounds}
        self.root = HubProcess(folder / "root", {**CONFIG, "rounds": rounds, "gate": GATE}).start()
        root = self.root.ask("ledger", "verify")["server"]
        self.hubs = {
            name: HubProcess(folder / name, {**CONFIG, "name": name, "region": {"root": root}}).start()
            for name in names
        }

    def add_members(self, region: str, number: int = 2) -> None:
        """Start members of a region, each with rows of its own."""
        for index in range(number):
            name = f"{region}-{index}"
            rows = self.folder / f"{name}.jsonl"
            seed = 10 * sorted(self.hubs).index(region) + index
            rows.write_text(
                "".join(json.dumps(row) + "\n" for row in generate(TASK, 100, seed=seed, split="train"))
            )
            self.clients[name] = start_client(
                self.folder / f"home-{name}", self.hubs[region], "--data", str(rows)
            )

    def join_root(self, region: str) -> None:
        """Start the agent by which a region contributes to the root."""
        arguments = ("--region", str(self.hubs[region].folder), "--name", region)
        self.clients[region] = start_client(self.folder / f"agent-{region}", self.root, *arguments)

    def wait_finished(self) -> None:
        """Wait until the root has no more rounds, and every agent has left."""

        def committed() -> bool:
            return int(self.root.ask("status")["committed"]) >= int(self.root.ask("status")["num_rounds"])

        self.root.wait_for("the root's rounds", committed, 4 * SECONDS)
        for region in self.hubs:
            assert self.clients[region].wait(timeout=SECONDS) == 0, self.log(f"agent-{region}")

    def log(self, name: str) -> str:
        """Return the end of an agent's or a member's log."""
        return (self.folder / name / "client.log").read_text()[-3000:]

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.clients.values():
            process.kill()
            process.wait()
        for hub in (self.root, *self.hubs.values()):
            if hub.process is not None:
                hub.kill()
