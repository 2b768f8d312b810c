"""A hub that shows two contributors two ledgers at the same time: alone nobody sees it, one comparison proves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.cli import main as cli
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from typer.testing import CliRunner

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.heads import SignedHead
from tests.support.tiny_hub import TinyHub


class Member:
    """A contributor, and the branch of the ledger that the hub shows to it."""

    def __init__(self, hub: TinyHub, folder: Path) -> None:
        self.hub, self.home = hub, Home.open(folder)
        address = Address.parse(hub.address)
        self.client = HubClient(self.home, address, establish(self.home, address, None, lambda _: True, True))
        self.client.status()
        self.client.enrol(folder.name)
        self.entries: list[Entry] = []
        self.heads: list[SignedHead] = []

    def shown(self) -> None:
        """Let the hub show this member its branch from now on."""
        self.hub.entries, self.hub.heads = self.entries, self.heads

    def follow(self, text: str) -> None:
        """Let the hub add an entry to this branch, which the member fetches."""
        self.shown()
        self.hub.record("note", {"text": text})
        self.client.status()

    def run(self, *arguments: str) -> Any:
        self.shown()
        options = ["--server", self.hub.address, "--home", str(self.home.folder)]
        return CliRunner().invoke(cli.app, [*arguments, *options])


@pytest.fixture
def members(tmp_path: Path) -> Iterator[tuple[Member, Member]]:
    hub = TinyHub(tmp_path / "hub", insecure=True).start()
    ann, bob = Member(hub, tmp_path / "ann"), Member(hub, tmp_path / "bob")
    yield ann, bob
    ann.client.close()
    bob.client.close()
    hub.stop()


def refused(shown: Any) -> str:
    assert isinstance(shown.exception, GymError), shown.output
    assert shown.exception.code is ErrorCode.LEDGER_FORKED
    return shown.exception.message


def test_two_branches_shown_at_the_same_time_are_proved_by_one_comparison_and_end_both_memberships(
    members: tuple[Member, Member], tmp_path: Path
) -> None:
    ann, bob = members
    for number in range(3):
        ann.follow(f"for ann {number}")
        bob.follow(f"for bob {number}")
    for member in members:
        assert member.run("status").exit_code == 0, "alone, nobody sees it"
    theirs = tmp_path / "bob.json"
    theirs.write_text(bob.run("ledger", "head", "--json").stdout)
    assert "two different heads of size 3" in refused(ann.run("ledger", "compare", str(theirs)))
    (proof,) = ann.home.proofs.iterdir()
    refused(bob.run("ledger", "compare", str(proof)))
    for member in members:
        assert str(member.home.proofs) in refused(member.run("status"))
    assert json.loads(proof.read_text())["heads"][0]["head"]["server"] == ann.hub.server
