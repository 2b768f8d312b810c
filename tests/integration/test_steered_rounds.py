"""A coordinator steers a federation of real processes: pause, another recipe, an earlier version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode
from tests.support.federation import Federation
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess, run

ROUNDS = {
    "num_rounds": 100,
    "min_contributors": 1,
    "deadline_seconds": 240,
    "lease_seconds": 30,
    "backoff_seconds": 1,
}


class Steered(Federation):
    """A federation of one contributor, whose commands a test can choose."""

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.hub.ask("status")
        return found

    def wait_for_next_version(self) -> None:
        wanted = len([line for line in self.hub.ask("rounds") if line["version"]]) + 1
        self.hub.wait_for(f"version {wanted}", lambda: self.status()["version"] >= wanted, 2 * SECONDS)

    def pause(self) -> None:
        """Let the round under way end, and no other begin."""
        self.hub.ask("pause", "--reason", "a demo")
        self.hub.wait_for("the end of the round", lambda: self.status()["round_state"] != "collecting")
        self.hub.wait_for("the end of the merge", lambda: self.status()["round_state"] != "merging")

    def command(self, *more: str) -> list[str]:
        home = str(self.folder / "ann")
        return ["gym-client", "join", "--server", self.hub.address, "--home", home, *more]

    def go_on(self, *more: str) -> WarmProcess:
        """The contributor again, without a word that accepts everything."""
        self.clients["ann"].kill()
        self.clients["ann"].wait()
        with open(self.folder / "ann" / "client.log", "ab") as log:
            self.clients["ann"] = WarmProcess(self.command(*more), stdout=log, stderr=log)
        return self.clients["ann"]


@pytest.fixture
def federation(tmp_path: Path, tiny_base: Path) -> Any:
    found = Steered(tmp_path, tiny_base, rounds=ROUNDS)
    yield found
    found.close()


@pytest.mark.slow  # a hub and a contributor, some rounds and several starts
def test_a_federation_is_paused_retuned_and_taken_back_and_its_ledger_stays_true(
    federation: Steered, tmp_path: Path
) -> None:
    hub = federation.hub.start()
    federation.join("ann")
    federation.wait_for_next_version()

    # A pause holds over a crash, and the contributor sees why nothing happens.
    federation.pause()
    hub.wait_for("the notice", lambda: "the hub is paused: a demo" in federation.log("ann"))
    hub.kill()
    hub.start()
    assert federation.status()["pause"]["why"] == "a demo"

    # Nobody joins by another recipe without a consent; --yes is one, and shows what changed.
    hub.ask("recipe", "set", "recipe.max_steps=2", "--reason", "quicker")
    federation.clients["ann"].kill()
    federation.clients["ann"].wait()
    assert run(federation.command()).returncode == ErrorCode.USAGE.exit_code
    federation.join("ann")
    hub.ask("resume")
    federation.wait_for_next_version()
    assert "recipe.max_steps: 3 -> 2" in federation.log("ann")

    # Who accepted these terms is not asked again, and trains nothing under others.
    federation.pause()
    ann = federation.go_on()
    hub.ask("resume")
    federation.wait_for_next_version()
    federation.pause()
    hub.ask("recipe", "set", "recipe.max_steps=4", "--reason", "better")
    hub.ask("resume")
    assert ann.wait(timeout=2 * SECONDS) == ErrorCode.TERMS_CHANGED.exit_code
    said = federation.log("ann")
    assert "recipe.max_steps: 2 -> 4" in said
    accept = said.rpartition("--accept ")[2].split()[0].strip("()")
    assert accept.startswith("terms:")

    # Back to version 1: the next version follows from it.
    hub.ask("rollback", "1", "--reason", "the loss rose")
    assert federation.status()["version"] == 1
    federation.go_on("--accept", accept)
    federation.wait_for_next_version()
    federation.pause()
    hub.stop()

    assert hub.ask("ledger", "verify")["valid"]
    committed = {line["server_round"]: line["version"] for line in hub.ask("rounds") if line["version"]}
    first, *_, before, last = sorted(committed)
    for server_round in (first, before, last):
        assert hub.ask("ledger", "replay", str(server_round))["version"] == committed[server_round]
    exported = tmp_path / "ledger.jsonl"
    hub.ask("ledger", "export", str(exported))
    home = str(federation.folder / "ann")
    checked = run(["gym-client", "rewards", "--home", home, "--verify", "--ledger", str(exported)])
    assert checked.returncode == 0, checked.stderr
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    back = next(line["body"] for line in lines if line.get("kind") == "rolled-back")
    made = {line["body"]["height"]: line["body"] for line in lines if line.get("kind") == "version"}
    assert back["to"] == made[1]["digest"] == made[back["newest_height"] + 1]["parent"]
