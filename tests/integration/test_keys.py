"""An account through its life at a real hub: earns, gives, gets another key, loses it, and gets one more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_server.store.database import Database
from gym_server.store.tables import credits, rounds

from gym_fed.core.errors import ErrorCode
from tests.support.hub import HubProcess
from tests.support.warm import run


def enrol(home: Path, hub: HubProcess, name: str) -> str:
    address, folder = Address.parse(hub.address), Home.open(home)
    pin = establish(folder, address, hub.fingerprint, lambda _: False)
    with HubClient(folder, address, pin) as client:
        contributor = client.enrol(name)
        client.authenticate()
    return contributor


def gym_client(*arguments: object, home: Path) -> tuple[int, Any]:
    done = run(["gym-client", *map(str, arguments), "--home", home, "--json"])
    return done.returncode, json.loads(done.stderr if done.returncode else done.stdout)


def earn(hub: HubProcess, contributor: str, amount: int) -> None:
    """Credits of a round long past, as a commit would have left them."""
    database = Database.open("sqlite:///hub.db", hub.folder)
    with database.transaction() as tx:
        row = {"server_round": 900, "state": "aborted", "base_height": 0, "opened_at": 0.0}
        tx.execute(rounds.insert().values(**row, closed_at=time.time() - 3600, reason=""))
        tx.execute(credits.insert().values(server_round=900, contributor=contributor, amount=amount))
    database.close()


@pytest.mark.slow
def test_an_account_outlives_its_keys(tmp_path: Path, tiny_base: Path) -> None:
    hub = HubProcess(tmp_path / "hub", {"rewards": {"hold_seconds": 0}}, str(tiny_base)).start()
    ann, bob, new = (tmp_path / name for name in ("ann", "bob", "new"))
    try:
        account, friend = enrol(ann, hub, "ann"), enrol(bob, hub, "bob")
        earn(hub, account, 100)
        place = ("--server", hub.address)

        status, reply = gym_client("transfer", *place, "--to", friend, "--amount", 101, home=ann)
        assert (status, reply["error"]["code"]) == (79, "transfer-refused")
        status, reply = gym_client("transfer", *place, "--to", friend, "--amount", 30, home=ann)
        assert (status, reply["amount"]) == (0, 30)
        assert gym_client("status", *place, home=bob)[1]["balance"] == 30

        status, reply = gym_client("key", "rotate", home=ann)
        assert (status, reply["servers"][0]["rotated"]) == (0, True)
        assert gym_client("status", *place, home=ann)[1]["contributor"] == account

        hub.ask("revoke", account, "--reason", "sold")
        status, reply = gym_client("status", *place, home=ann)
        assert status == ErrorCode.KEY_REVOKED.exit_code
        assert reply["error"]["code"] == "key-revoked"

        public_key = gym_client("id", home=new)[1]["public_key"]
        hub.ask("rebind", account, "--public-key", public_key)
        assert enrol(new, hub, "ann") == account
        found = next(a for a in hub.ask("accounts") if a["contributor"] == account)
        assert [key["status"] for key in found["keys"]] == ["rotated", "revoked", "active"]
        assert (found["status"], found["balance"]) == ("active", 70)

        status, reply = gym_client("key", "revoke", "--yes", home=new)
        assert (status, reply["servers"][0]["revoked"]) == (0, True)
        kinds = [entry["kind"] for entry in hub.ask("ledger", "show")]
        wanted = ["enrolled", "enrolled", "transfer", "transfer-settled", "rotated", "revoked", "verdict"]
        assert kinds == [*wanted, "rebound", "revoked"]
    finally:
        hub.stop()
