"""A hub and its contributors as real processes, and what must be true of them whatever was killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.hub import HubProcess, start_client
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

ROUNDS, POOL = 2, 1000
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": ROUNDS, "min_contributors": 2, "deadline_seconds": 240, "lease_seconds": 6},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 3, "per_device_train_batch_size": 4, "max_length": 64},
    "rewards": {"pool": POOL},
}


class Federation:
    """A hub and its contributors, cleaned up whatever happens."""

    def __init__(self, folder: Path, base: Path, **changes: Any) -> None:
        self.folder = folder
        self.base = base
        self.database = changes.get("storage", {}).get("database", "")
        self.hub = HubProcess(folder / "hub", {**CONFIG, **changes}, str(base))
        self.entrance = ""
        """Address at which contributors reach the hub; empty for its own."""
        self.clients: dict[str, WarmProcess] = {}

    def join(
        self,
        name: str,
        failpoints: str = "",
        rows: list[dict[str, Any]] | None = None,
        arguments: Sequence[str] = (),
    ) -> WarmProcess:
        """Start, or start again, the contributor ``name`` on its own home, with rows of its own name if not given."""
        data = self.folder / f"{name}.jsonl"
        if rows is None:
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": f"{name} {i}"},
                        {"role": "assistant", "content": name * 2},
                    ]
                }
                for i in range(12)
            ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = ("--data", str(data), "--base", str(self.base), "--name", name, *arguments)
        self.clients[name] = start_client(
            self.folder / name, self.hub, *own, failpoints=failpoints, address=self.entrance
        )
        return self.clients[name]

    def log(self, name: str) -> str:
        return (self.folder / name / "client.log").read_text()

    def complete(self, *names: str) -> None:
        """Run all rounds with these contributors, each of whom must count once in every round."""
        self.hub.start("--exit-when-done")
        for name in names:
            self.join(name)
        self.finish()
        assert_every_contributor_counts_once_a_round(self.hub, set(names))

    def finish(self) -> None:
        """Wait for the last round, and for every contributor that lives."""
        self.hub.wait_for("the end", self._is_over, 4 * SECONDS)
        self.hub.wait_done(SECONDS)
        for name, process in self.clients.items():
            if process.poll() != -9:
                assert process.wait(timeout=SECONDS) == 0, self.log(name)[-3000:]

    def _is_over(self) -> bool:
        for name, process in self.clients.items():
            assert process.poll() in (None, 0, -9), (
                f"{name}:\n{self.log(name)[-3000:]}\n{self.hub.log()[-2000:]}"
            )
        assert self.hub.process is not None
        return self.hub.process.poll() is not None

    def close(self) -> None:
        for process in self.clients.values():
            process.kill()
            process.wait()
        if self.hub.process is not None:
            self.hub.kill()


def assert_every_contributor_counts_once_a_round(
    hub: HubProcess, names: set[str], rounds: int = ROUNDS
) -> None:
    committed = [r for r in hub.ask("rounds") if r["state"] == "committed"]
    assert len(committed) == rounds
    for found in committed:
        merged = Counter(u["name"] for u in found["updates"] if u["verdict"] == "merged")
        assert merged == Counter(names), found
        assert sum(u["credit"] for u in found["updates"]) == POOL
    assert hub.ask("ledger", "verify")["valid"]
    paid = sum(c["balance"] for c in hub.ask("status")["contributors"])
    assert paid == POOL * rounds
