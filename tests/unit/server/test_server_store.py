"""The hub's tables keep what they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from gym_server.ledger.chain import Ledger
from gym_server.rounds.round_store import RoundStore
from gym_server.store.database import Database

from gym_fed.trust.identity.keys import SigningKey


@pytest.mark.parametrize("node_id", [1, 2**63 - 1, 2**63, 17614978349170332665, 2**64 - 1])
def test_every_node_id_of_flower_is_kept(tmp_path: Path, node_id: int) -> None:
    database = Database.open("sqlite:///hub.db", tmp_path)
    round_store = RoundStore(database, Ledger(database, SigningKey.generate()), "sha256:" + "0" * 64)
    round_store.record_tasks(1, {node_id: "first"})
    round_store.record_tasks(1, {node_id: "again"})
    assert round_store.tasks(1) == {node_id: ("again", "")}
