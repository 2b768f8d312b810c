"""What a hub promises its contributors holds on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gym_server.federation import Federation
from gym_server.rounds.admission import Receipt
from gym_server.store.objects import ObjectStore
from gym_server.store.tables import credits, updates
from gym_server.store.unavailable import StoreUnavailable
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.heads import EntryProof
from tests.support.private_hub import NAMES, PrivateRounds, private_hub

ROUNDS = 3
FOUR = (*NAMES, "dan")


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path, database_url: str) -> Iterator[PrivateRounds]:
    rounds = {"num_rounds": ROUNDS, "min_contributors": len(FOUR)}
    changes = {"privacy": None, "rounds": rounds, "storage": {"database": database_url}}
    folder = private_hub(tmp_path / "hub", tiny_base, enrolment={"policy": "open"}, **changes)
    with Federation.open(folder) as federation, federation.hub_lock():
        found = PrivateRounds(federation)
        found.keys["dan"] = SigningKey.generate()
        for key in found.keys.values():
            federation.accounts.get_or_create(key.public_key)
        yield found


def at_once(hub: PrivateRounds, number: int) -> dict[str, Receipt]:
    """Everybody's update, and readers of the ledger and of the heads meanwhile, each on a thread of its own."""
    begin, over = threading.Barrier(len(FOUR) + 1), threading.Event()

    def send(name: str) -> Receipt:
        path = hub.delta(name, number) if name in NAMES else hub.delta("ann", number + 50)
        begin.wait()
        return hub.send(name, number, path)

    def read() -> None:
        begin.wait()
        while not over.is_set():
            list(hub.fed.ledger.entries())
            hub.fed.ledger.newest_head()

    with ThreadPoolExecutor(len(FOUR) + 1) as pool:
        reader = pool.submit(read)
        try:
            receipts = dict(zip(FOUR, pool.map(send, FOUR), strict=True))
        finally:
            over.set()
        reader.result()
    return receipts


def test_updates_sent_at_once_are_all_in_the_ledger_merged_and_paid(hub: PrivateRounds) -> None:
    for number in range(1, ROUNDS + 1):
        hub.collect(send=False)
        receipts = at_once(hub, number)
        entries = {entry.sequence: entry for entry in hub.fed.ledger.entries()}
        for receipt in receipts.values():
            assert receipt.verdict == "admitted"
            assert entries[receipt.ledger_sequence].hash == receipt.ledger_hash
            EntryProof.from_dict(receipt.proof).verify(hub.fed.key.public_key)
        assert hub.finish(number).state == "committed"
        with hub.fed.database.reading() as tx:
            paid = tx.scalars(select(credits.c.contributor).where(credits.c.server_round == number)).all()
            merged = tx.scalars(
                select(updates.c.contributor).where(
                    updates.c.server_round == number, updates.c.verdict == "merged"
                )
            ).all()
        everybody = sorted(key.contributor for key in hub.keys.values())
        assert sorted(paid) == sorted(merged) == everybody
    assert hub.fed.ledger.verify()["entries"] == len(list(hub.fed.ledger.entries()))


def test_a_second_update_in_a_round_is_refused_and_the_first_stays(hub: PrivateRounds) -> None:
    hub.collect(send=False)
    first = hub.send("ann", 1, hub.delta("ann", 1))
    with pytest.raises(GymError) as refusal:
        raise_refusal(hub.send("ann", 1, hub.delta("ann", 2)))
    assert refusal.value.code is ErrorCode.UPDATE_REFUSED
    with hub.fed.database.reading() as tx:
        admitted = tx.scalars(select(updates.c.update_id).where(updates.c.verdict == "admitted")).all()
    assert admitted == [first.update]


def raise_refusal(receipt: Receipt) -> None:
    if receipt.verdict == "refused":
        raise GymError(ErrorCode(receipt.code), receipt.reason)


def test_an_object_store_that_is_away_is_no_verdict_on_an_update(
    hub: PrivateRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.collect(send=False)
    path = hub.delta("ann", 1)

    def away(self: ObjectStore, sha256: str) -> Path:
        raise StoreUnavailable(GymError(ErrorCode.UNAVAILABLE, "503"))

    monkeypatch.setattr(ObjectStore, "local_path", away)
    with pytest.raises(StoreUnavailable):
        hub.send("ann", 1, path)
    monkeypatch.undo()
    with hub.fed.database.reading() as tx:
        assert not tx.execute(select(updates)).all()
    assert hub.send("ann", 1, path).verdict == "admitted"
