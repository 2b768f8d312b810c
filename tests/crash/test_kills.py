"""Nothing acknowledged is lost and nothing is counted twice, wherever a process is killed.

Real processes, SIGKILL, and the same folder again. After every kill the federation must end with its two rounds
committed, every contributor merged exactly once a round, the pool paid once a round, and a ledger that verifies.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import HubProcess, start_client

ROUNDS, POOL = 2, 1000
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": ROUNDS, "min_contributors": 2, "deadline_seconds": 240, "lease_seconds": 6},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 3, "per_device_train_batch_size": 4, "max_length": 64},
    "rewards": {"pool": POOL},
}
SERVER_KILLS = [
    "state-open",
    "state-collecting",
    "upload-chunk",
    "after-submit",
    "state-merging",
    "before-commit",
    "after-commit",
]
CLIENT_KILLS = ["client-trained", "client-before-upload", "client-before-submit", "client-after-submit"]


class Federation:
    """A hub and its contributors, cleaned up whatever happens."""

    def __init__(self, folder: Path, base: Path, **changes: Any) -> None:
        self.folder = folder
        self.base = base
        self.hub = HubProcess(folder / "hub", {**CONFIG, **changes}, str(base))
        self.clients: dict[str, subprocess.Popen[str]] = {}

    def join(self, name: str, failpoints: str = "") -> subprocess.Popen[str]:
        """Start, or start again, the contributor ``name`` on its own home."""
        data = self.folder / f"{name}.jsonl"
        rows = [
            [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": name * 2}]
            for i in range(12)
        ]
        data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
        arguments = ("--data", str(data), "--model", str(self.base), "--name", name)
        self.clients[name] = start_client(self.folder / name, self.hub, *arguments, failpoints=failpoints)
        return self.clients[name]

    def log(self, name: str) -> str:
        return (self.folder / name / "client.log").read_text()

    def finish(self) -> None:
        """Wait for the last round, and for every contributor that lives."""
        self.hub.wait_for("the end", self._is_over, 240)
        self.hub.wait_done(30)
        for name, process in self.clients.items():
            if process.poll() != -9:
                assert process.wait(timeout=60) == 0, self.log(name)[-3000:]

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


@pytest.fixture
def federation(tmp_path: Path, tiny_base: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, tiny_base)
    yield found
    found.close()


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


@pytest.mark.parametrize("line", SERVER_KILLS)
def test_a_server_killed_at_any_line_goes_on_from_there(federation: Federation, line: str) -> None:
    names = ("ann", "bob")
    federation.hub.start("--exit-when-done", failpoints=line)
    if line != "state-open":  # a hub that nobody has met yet cannot be waited for
        for name in names:
            federation.join(name)
    federation.hub.wait_killed()
    federation.hub.start("--exit-when-done")
    if line == "state-open":
        for name in names:
            federation.join(name)
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})


@pytest.mark.parametrize("line", CLIENT_KILLS)
def test_a_contributor_killed_at_any_line_goes_on_from_there(federation: Federation, line: str) -> None:
    federation.hub.start("--exit-when-done")
    federation.join("bob")
    assert federation.join("ann", failpoints=line).wait(timeout=120) == -9
    federation.join("ann")
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
    if line != "client-trained":  # the signed update was kept: the first round was trained once, not twice
        assert federation.log("ann").count("training 3/3") == ROUNDS


def test_a_contributor_killed_while_training_resumes_from_its_checkpoint(
    tmp_path: Path, tiny_base: Path
) -> None:
    federation = Federation(tmp_path, tiny_base, recipe={"max_steps": 400, "per_device_train_batch_size": 4})
    try:
        federation.hub.start("--exit-when-done")
        federation.join("bob")
        ann = federation.join("ann")
        federation.hub.wait_for("ann at step 120", lambda: "training 120/400" in federation.log("ann"), 120)
        ann.kill()
        ann.wait()
        federation.join("ann")
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})
        assert federation.log("ann").count("training 1/400") == ROUNDS  # never began anew
    finally:
        federation.close()


def test_who_leaves_for_good_is_not_waited_for(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    gone = federation.join("eve", failpoints="client-trained")
    assert gone.wait(timeout=120) == -9
    for name in ("ann", "bob"):
        federation.join(name)
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})


def test_who_joins_late_is_in_the_same_round(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    federation.join("ann")
    federation.hub.wait_for("ann's first receipt", lambda: "receipt: admitted" in federation.log("ann"), 90)
    federation.join("bob")
    federation.finish()
    assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"})


def test_a_round_without_a_quorum_aborts_with_a_reason_and_the_next_one_succeeds(
    tmp_path: Path, tiny_base: Path
) -> None:
    rounds = {**CONFIG["rounds"], "num_rounds": 1, "deadline_seconds": 12}
    federation = Federation(tmp_path, tiny_base, rounds=rounds)
    try:
        federation.hub.start("--exit-when-done")
        federation.join("ann")
        aborted = federation.hub.wait_for(
            "an abort", lambda: [r for r in federation.hub.ask("rounds") if r["state"] == "aborted"], 90
        )[0]
        assert aborted["reason"] == "1 of 2 updates at the deadline"
        assert [u["verdict"] for u in aborted["updates"]] == ["aborted"]
        federation.join("bob")
        federation.finish()
        assert_every_contributor_counts_once_a_round(federation.hub, {"ann", "bob"}, rounds=1)
    finally:
        federation.close()


def test_a_finished_hub_started_again_makes_nothing_new(federation: Federation) -> None:
    federation.hub.start("--exit-when-done")
    for name in ("ann", "bob"):
        federation.join(name)
    federation.finish()
    before = federation.hub.ask("status"), federation.hub.ask("ledger", "show")
    federation.hub.start("--exit-when-done").wait_done()
    after = federation.hub.ask("status"), federation.hub.ask("ledger", "show")
    assert (before[0]["version_digest"], before[1]) == (after[0]["version_digest"], after[1])


def test_two_servers_on_one_folder_are_refused(federation: Federation) -> None:
    from tests.support.hub import BIN

    federation.hub.start()
    second = subprocess.run(
        [BIN / "gym-server", "run", "--dir", federation.hub.folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 91
    assert "another gym-server runs" in second.stderr
