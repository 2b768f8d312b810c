"""The demo's community in a moment: a real hub, and contributors of bare calls whose deltas are random.

What the hub judges and writes down is as in `make demo`: honest updates of one size, and a malicious one that is
twenty times larger. Nothing is trained.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from gym_fed.data.generated import generate
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, random_delta, spec_of
from tests.support.hub import HubProcess

HONEST = ("ada", "ben", "cleo")
MALICIOUS = "mallory"
ROUNDS = 3
CONFIG: dict[str, Any] = {
    "name": "the demo's community",
    "rounds": {"num_rounds": ROUNDS, "min_contributors": 4, "deadline_seconds": 600, "lease_seconds": 600},
    "recipe": {"max_steps": 25, "max_length": 96},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "gate": {"heldout": "heldout.jsonl", "max_examples": 16, "max_length": 96, "max_loss_increase": 5.0},
    "rewards": {"pool": 900},
}
INFLATION = 20.0


class Community:
    """A hub and its contributors.

    Args:
        folder: The hub's is ``hub`` in it.
        num_rounds: How many the hub runs.
        config: Further sections of its config.
    """

    def __init__(self, folder: Path, num_rounds: int = ROUNDS, **config: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        rounds = {**CONFIG["rounds"], "num_rounds": num_rounds}
        self.hub = HubProcess(folder / "hub", {**CONFIG, "rounds": rounds, **config})
        rows = generate("copy", 16, seed=7, split="heldout")
        (folder / "hub" / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.contributors: list[RawContributor] = []
        self._seed = 0

    def start(self) -> Community:
        """Start the hub, or start it again."""
        self.hub.start()
        return self

    def join(self, names: tuple[str, ...] = (*HONEST, MALICIOUS)) -> None:
        """Enrol contributors; the last one is malicious."""
        self.contributors += [RawContributor(self.hub.address, name).enrol() for name in names]

    def play(self, on_step: Callable[[str], None] = lambda _: None) -> None:
        """One round: each takes a task, reports progress, and contributes.

        Args:
            on_step: Called between the steps, with the name of what has just happened.
        """
        before = self.num_committed()
        tasks = [one.next_task() for one in self.contributors]
        on_step("leased")
        for number, (one, task) in enumerate(zip(self.contributors, tasks, strict=True)):
            beat = pb.HeartbeatRequest(message_id=task.message_id, phase="train", done=10 + number, total=25)
            one.call(one.stub.Heartbeat, beat)
        on_step("at work")
        for one, task in zip(self.contributors, tasks, strict=True):
            one.contribute(self._delta(one, spec_of(task).version_digest), task)
            on_step(f"{one.name} contributed")
        self.hub.wait_for("the round's end", lambda: self.num_committed() > before)

    def num_committed(self) -> int:
        """Committed rounds so far."""
        with closing(sqlite3.connect(f"file:{self.folder / 'hub' / 'hub.db'}?mode=ro", uri=True)) as database:
            rows = database.execute("select count(*) from rounds where state = 'committed'")
            return int(rows.fetchone()[0])

    def close(self) -> None:
        for one in self.contributors:
            one.close()
        self.hub.stop()

    def _delta(self, of: RawContributor, version: str) -> bytes:
        self._seed += 1
        scale = 1e-4 * (INFLATION if of is self.contributors[-1] else 1.0)
        return random_delta(self.folder, version, self._seed, "gym-nano", scale)
