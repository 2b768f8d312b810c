"""A contributor and a hub whose connections break in a chosen call: the exchange ends as without the fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from gym_client.agent.agent import Agent
from gym_client.agent.tasks import FinishedUpdate
from gym_client.app import update_records
from gym_client.cli.join import enter
from gym_client.display import Display
from gym_client.hub.backoff import Outage, retry_at_known_hub
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.ledger.copy import LedgerCopy
from gym_server.store.tables import readers, updates
from sqlalchemy import select

from gym_fed.trust.ledger.export import verify_file
from gym_fed.trust.wire.records import to_wire
from tests.support.faulty_line import KINDS, FaultyLine
from tests.support.loopback_hub import LoopbackHub, give_task, some_delta, update_of
from tests.support.quick import quick
from tests.support.wait import SECONDS

CALLS = [
    "Status",
    "Enrol",
    "Authenticate",
    "Account",
    "Work",
    "Download",
    "Heartbeat",
    "BeginUpload",
    "Upload",
    "Submit",
    "LedgerProof",
    "LedgerHeads",
    "Ledger",
]
T = TypeVar("T")


class FaultAt:
    """Breaks the connections of a line when the hub begins to serve a method for the first time."""

    def __init__(self, method: str, kind: str) -> None:
        self._method, self._kind = method, kind
        self.line: FaultyLine | None = None
        self.struck = threading.Event()

    def __call__(self, method: str) -> None:
        if method == self._method and self.line is not None and not self.struck.is_set():
            self.struck.set()
            self.line.fail(self._kind)


class StopOnFailure(Display):
    """Ends the agent when its task failed, since no other task would come."""

    stop: Callable[[], None]

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        if event in ("failed", "lost"):
            print(text)
            self.stop()


@pytest.mark.parametrize(
    ("method", "kind"),
    quick([(method, kind) for method in CALLS for kind in KINDS], *((method, "reset") for method in CALLS)),
)
def test_a_round_whose_connections_break_in_a_call_has_one_update_and_a_valid_ledger(
    tmp_path: Path, method: str, kind: str
) -> None:
    fault = FaultAt(method, kind)
    hub = LoopbackHub(tmp_path / "hub", on_call=fault)
    delta = some_delta(tmp_path, digest=hub.fed.base.digest)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        until_struck(fault, method == "Heartbeat")
        task = message.metadata.message_id
        manifest = update_of(hub, client.pin.contributor, task, delta.read_bytes())
        key = home.key
        finished = FinishedUpdate(manifest, manifest.sign(key), key.public_key, delta, {})
        return Message(update_records(finished, by_reference=False), reply_to=message)

    with FaultyLine(int(hub.address.rpartition(":")[2])) as line:
        home, address = Home.open(tmp_path / "ann"), Address.parse(line.address)
        pin = establish(home, address, hub.fed.fingerprint, lambda _: False)
        client = HubClient(home, address, pin)
        fault.line = line

        def retried(action: Callable[[], T]) -> T:
            return retry_at_known_hub(client, threading.Event(), Outage(Display()), action)

        with client:
            retried(lambda: enter(client, "ann", ""))
            content = to_wire(RecordDict({"arrays": ArrayRecord([np.ones(3)])}), lambda data: keep(hub, data))
            give_task(hub, client.node_id, content=content.SerializeToString())
            display = StopOnFailure()
            agent = Agent(app, home, client, display=display)
            display.stop = agent.stop
            (receipt,) = agent.run(max_rounds=1).receipts
            copy = LedgerCopy(home, bytes.fromhex(client.pin.ledger_key))
            retried(lambda: copy.sync(client))
        assert fault.struck.is_set()
        assert line.failed[0] == kind
    assert receipt["verdict"] == "admitted"
    with hub.fed.database.reading() as tx:
        assert list(tx.scalars(select(updates.c.contributor))) == [client.pin.contributor]
    verify_file(copy.path, bytes.fromhex(client.pin.ledger_key))
    assert copy.size() == len(list(hub.fed.ledger.entries()))
    hub.close()


def until_struck(fault: FaultAt, is_awaited: bool) -> None:
    if is_awaited:
        assert fault.struck.wait(SECONDS)


def keep(hub: LoopbackHub, data: bytes) -> None:
    """Store an object that every contributor may read."""
    sha256 = hub.fed.store.put_bytes(data)
    with hub.fed.database.transaction() as tx:
        tx.execute(readers.insert().values(sha256=sha256, contributor="*"))
