"""Keys and transfers in the ledger: tables that say something else, and entries that no owner signed, are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gym_server.store.tables import account_keys, accounts, transfers
from sqlalchemy import Table, delete, true, update

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.statements import TransferOrder
from gym_fed.trust.ledger.export import first_line, lines, verify_lines
from tests.support.balance_hub import HOLD, Hub


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


@pytest.fixture
def owner() -> SigningKey:
    return SigningKey.generate()


def edit(table: Table, where: Any = True, **values: Any) -> Any:
    return update(table).where(where if where is not True else true()).values(**values)


WAS = account_keys.c.status == "rotated"
EDITS: dict[str, tuple[Any, str]] = {
    "settled": (edit(transfers, status="settled"), "transfers"),
    "amount": (edit(transfers, amount=1), "transfers"),
    "deleted": (delete(transfers), "transfers"),
    "asked at": (edit(transfers, asked_at=0.0), "transfers"),
    "hold": (edit(transfers, hold_seconds=0.0), "transfers"),
    "nonce": (edit(transfers, nonce="n"), "transfers"),
    "status": (edit(accounts, status="active"), "accounts"),
    "name": (edit(accounts, name="somebody else"), "accounts"),
    "key": (edit(accounts, accounts.c.status == "revoked", public_key=b"k" * 32), "keys"),
    "key good again": (edit(account_keys, WAS, status="active"), "keys"),
    "key revoked": (edit(account_keys, WAS, status="revoked"), "keys"),
    "key since": (edit(account_keys, valid_from=0.0), "keys"),
    "key until": (edit(account_keys, WAS, valid_until=9e12), "keys"),
    "key of nobody": (delete(account_keys).where(WAS), "keys"),
    "key of another": (edit(account_keys, WAS, contributor="c" + "0" * 32), "keys"),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_a_key_or_transfer_without_an_entry_in_the_ledger_is_found(
    hub: Hub, owner: SigningKey, name: str
) -> None:
    change, message = EDITS[name]
    account, friend = hub.enrol(owner), hub.enrol(other := SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    hub.transfer(account, owner, friend, 40)
    hub.revoke(friend, other)
    hub.rotate(account, owner, SigningKey.generate())
    assert hub.ledger.verify()["transfers"] == 1
    with hub.database.transaction() as tx:
        tx.execute(change)
    with pytest.raises(GymError, match=message) as caught:
        hub.ledger.verify()
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def forged(hub: Hub, kind: str, **body: Any) -> str:
    """What an entry that no honest hub writes is refused with by everybody who checks the ledger."""
    with hub.database.transaction() as tx:
        hub.ledger.append(tx, kind, body)
    with pytest.raises(GymError) as caught:
        hub.ledger.verify()
    text = [first_line(hub.ledger.public_key), *lines(hub.ledger.entries(), hub.ledger.heads())]
    with pytest.raises(GymError) as again:
        verify_lines([line.encode() + b"\n" for line in text], "it")
    assert caught.value.code is again.value.code is ErrorCode.STATE_CORRUPT
    assert caught.value.message in again.value.message
    return caught.value.message


def test_a_transfer_that_its_owner_did_not_sign_is_found(hub: Hub, owner: SigningKey) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    order = TransferOrder(
        sender=account, to=friend, amount=9, server=hub.server, tls="", issued_at=int(hub.now)
    )
    body = {"transfer": order.digest, "from": account, "to": friend, "amount": 9, "hold_seconds": HOLD}
    signature = order.sign(SigningKey.generate()).hex()
    said = forged(hub, "transfer", **body, statement=order.signed(), signature=signature)
    assert "is not signed by its key" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [({"to": "c" + "0" * 32}, "something else"), ({"server": "s" + "0" * 16}, "a statement for s")],
    ids=["recipient", "hub"],
)
def test_a_transfer_that_its_owner_signed_for_something_else_is_found(
    hub: Hub, owner: SigningKey, change: dict[str, str], message: str
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    meant: dict[str, Any] = {"from": account, "to": friend, "amount": 9, "server": hub.server, "tls": ""}
    order = TransferOrder.model_validate({**meant, "issued_at": int(hub.now), **change})
    body = {"transfer": order.digest, "from": account, "to": friend, "amount": 9, "hold_seconds": HOLD}
    said = {"statement": order.signed(), "signature": order.sign(owner).hex()}
    assert message in forged(hub, "transfer", **body, **said)


def test_a_transfer_that_settles_early_or_twice_is_found(hub: Hub, owner: SigningKey) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    name = hub.transfer(account, owner, friend, 40)["transfer"]
    hub.now += HOLD - 5
    body = {"transfer": name, "from": account, "to": friend, "amount": 40}
    assert "settled within its hold period" in forged(hub, "transfer-settled", **body)
    hub.now += 10
    assert "settled within its hold period" in forged(hub, "transfer-settled", **body)


def test_a_rotation_a_revocation_and_a_rebinding_that_nobody_signed_are_found(
    hub: Hub, owner: SigningKey
) -> None:
    account, evil = hub.enrol(owner), SigningKey.generate().public_key.hex()
    empty = {"contributor": account, "statement": {}, "signature": "", "new_signature": ""}
    history = History()
    for entry in hub.ledger.entries():
        history.add(entry.kind, entry.body)
    for kind, body, message in (
        ("rotated", {"public_key": evil, "previous_key": owner.public_key.hex()}, "not signed by both keys"),
        ("revoked", {"public_key": owner.public_key.hex(), "by": "owner"}, "none of its keys signed"),
        ("rebound", {"public_key": evil, "by": "coordinator"}, "was not revoked"),
        ("enrolled", {"public_key": evil}, "a different key from before"),
        ("rotated", {}, "a malformed entry"),
    ):
        with pytest.raises(GymError, match=message):
            history.add(kind, {**empty, **body, "at": int(hub.now)})


def test_a_credit_that_is_recorded_twice_is_found(hub: Hub, owner: SigningKey) -> None:
    account = hub.enrol(owner)
    hub.earn(account, 100)
    assert "credit 1 is recorded twice" in forged(
        hub, "credit", server_round=1, contributor=account, amount=100
    )
