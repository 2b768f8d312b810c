"""Keys of accounts over time, and what a thief of one can do: nothing with past credits, within the hold period."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.accounts import Accounts, Session
from gym_server.federation import Federation
from gym_server.keys import Keys
from gym_server.ledger import Ledger
from gym_server.payouts import Payouts
from gym_server.setup import init_hub
from gym_server.store.database import Database
from gym_server.store.tables import accounts, credits, key_refusals, rounds, transfers
from sqlalchemy import delete, func, select, update

from gym_fed.config.server import EnrolmentConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity import encryption
from gym_fed.identity.history import key_at
from gym_fed.identity.keys import SigningKey, server_id
from gym_fed.identity.manifest import UpdateManifest, new_nonce
from gym_fed.identity.statements import Revocation, Rotation, TransferOrder
from gym_fed.identity.tls import private_pem

HOLD = 1000.0


class Hub:
    """The parts of a hub that know keys and credits, at a time that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = time.time()
        self.database = Database.open("sqlite:///hub.db", folder)
        key = SigningKey.generate()
        self.server = server_id(key.public_key)
        self.ledger = Ledger(self.database, key)
        clock = lambda: self.now  # noqa: E731
        self.payouts = Payouts(self.database, self.ledger, self.server, HOLD, clock)
        self.keys = Keys(self.database, self.ledger, self.server, self.payouts, HOLD, clock)
        policy = EnrolmentConfig(policy="open")
        self.accounts = Accounts(self.database, self.ledger, self.keys, policy, self.server, b"s" * 32)

    def enrol(self, key: SigningKey, name: str = "n") -> str:
        signed = {"enrol": name, "invite": "", "server": self.server}
        return self.accounts.enrol(key.public_key, name, "", key.sign(signed))

    def log_in(self, contributor: str, key: SigningKey) -> Session:
        claim = {"authenticate": contributor, "instance": "instance1", "nonce": "n", "server": self.server}
        claim["issued_at"] = now = int(time.time())
        token, _, _ = self.accounts.authenticate(contributor, "instance1", now, "n", key.sign(claim))
        return self.accounts.session(token)

    def earn(self, contributor: str, amount: int) -> None:
        with self.database.transaction() as tx:
            number = int(tx.scalar(select(func.max(rounds.c.server_round))) or 0) + 1
            row = {"server_round": number, "state": "committed", "base_height": 0, "opened_at": self.now}
            tx.execute(rounds.insert().values(**row, closed_at=self.now, reason=""))
            paid = {"server_round": number, "contributor": contributor, "amount": amount}
            tx.execute(credits.insert().values(**paid))
            self.ledger.append(tx, "credit", paid)

    def rotate(self, contributor: str, old: SigningKey, new: SigningKey) -> dict[str, Any]:
        said = Rotation(
            rotate=contributor, new_key=new.public_key.hex(), server=self.server, issued_at=int(self.now)
        )
        return self.keys.rotate(said.to_json(), said.sign(old), new.public_key, said.sign(new))

    def revoke(self, contributor: str, key: SigningKey) -> dict[str, Any]:
        said = Revocation(
            revoke=contributor, key=key.public_key.hex(), server=self.server, issued_at=int(self.now)
        )
        return self.keys.revoke(contributor, key.public_key, said.to_json(), said.sign(key))

    def transfer(self, sender: str, key: SigningKey, to: str, amount: int) -> dict[str, Any]:
        order = TransferOrder(
            sender=sender, to=to, amount=amount, server=self.server, issued_at=int(self.now)
        )
        return self.payouts.ask(sender, order.to_json(), order.sign(key))

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.ledger.entries()]

    def code(self, call: Any, *arguments: Any) -> ErrorCode:
        with pytest.raises(GymError) as caught:
            call(*arguments)
        return caught.value.code


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


@pytest.fixture
def owner() -> SigningKey:
    return SigningKey.generate()


def test_after_a_rotation_the_account_keeps_its_id_and_the_old_key_opens_nothing(
    hub: Hub, owner: SigningKey
) -> None:
    account, new = hub.enrol(owner), SigningKey.generate()
    before = hub.log_in(account, owner)
    hub.rotate(account, owner, new)
    assert hub.log_in(account, new).contributor == account
    assert hub.code(hub.log_in, account, owner) is ErrorCode.KEY_REVOKED
    assert hub.code(hub.accounts.check, before) is ErrorCode.UNAUTHENTICATED
    assert hub.code(hub.enrol, owner) is ErrorCode.KEY_REVOKED
    assert hub.enrol(new) == account
    assert [k["status"] for k in hub.keys.history()[account]] == ["rotated", "active"]


def test_a_rotation_asked_twice_is_one_and_a_used_key_is_refused(hub: Hub, owner: SigningKey) -> None:
    account, new, other = hub.enrol(owner), SigningKey.generate(), SigningKey.generate()
    assert hub.rotate(account, owner, new) == hub.rotate(account, owner, new)
    assert hub.kinds() == ["enrolled", "rotated"]
    hub.enrol(other)
    assert hub.code(hub.rotate, account, new, other) is ErrorCode.USAGE
    assert hub.code(hub.rotate, account, new, owner) is ErrorCode.USAGE
    assert hub.code(hub.rotate, account, other, SigningKey.generate()) is ErrorCode.SIGNATURE_INVALID


def test_a_revoked_key_does_nothing_until_the_coordinator_binds_another_one(
    hub: Hub, owner: SigningKey
) -> None:
    account, new = hub.enrol(owner), SigningKey.generate()
    session = hub.log_in(account, owner)
    hub.revoke(account, owner)
    assert hub.code(hub.accounts.check, session) is ErrorCode.KEY_REVOKED
    assert hub.code(hub.log_in, account, owner) is ErrorCode.KEY_REVOKED
    assert hub.code(hub.rotate, account, owner, new) is ErrorCode.KEY_REVOKED
    assert hub.code(hub.enrol, owner) is ErrorCode.KEY_REVOKED
    hub.keys.rebind(account, new.public_key)
    assert hub.log_in(account, new).contributor == account
    assert hub.enrol(new) == account
    assert hub.kinds() == ["enrolled", "revoked", "rebound"]


def test_refusals_of_a_revoked_key_are_told_once_a_round(hub: Hub, owner: SigningKey) -> None:
    account = hub.enrol(owner)
    hub.keys.revoke_as_coordinator(account, "sold")
    for call in ("Upload", "Submit", "Work"):
        hub.keys.refused(account, call)
    hub.earn(account, 1)  # another round
    hub.keys.refused(account, "Submit")
    told = [entry.body for entry in hub.ledger.entries() if entry.kind == "verdict"]
    assert [(t["server_round"], t["verdict"]) for t in told] == [(0, "refused"), (1, "refused")]
    assert told[0]["reason"] == "key-revoked: Upload with a revoked key"
    with hub.database.reading() as tx:
        assert len(tx.execute(select(key_refusals)).all()) == 2


def test_the_owner_revokes_after_a_thief_has_rotated_but_only_within_the_hold(
    hub: Hub, owner: SigningKey
) -> None:
    account, thief = hub.enrol(owner), SigningKey.generate()
    hub.rotate(account, owner, thief)
    hub.now += HOLD + 1
    assert hub.code(hub.revoke, account, owner) is ErrorCode.PERMISSION_DENIED
    hub.now -= 2
    hub.revoke(account, owner)
    assert hub.code(hub.log_in, account, thief) is ErrorCode.KEY_REVOKED
    hub.keys.rebind(account, (new := SigningKey.generate()).public_key)
    assert hub.code(hub.revoke, account, owner) is ErrorCode.PERMISSION_DENIED, "a replay of the revocation"
    assert hub.log_in(account, new)


def test_a_transfer_settles_after_the_hold_and_only_once(hub: Hub, owner: SigningKey) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += HOLD + 1
    told = hub.transfer(account, owner, friend, 30)
    assert (told["status"], told["settles_at"]) == ("pending", int(hub.now + HOLD))
    standing = hub.payouts.standing(account)
    assert (standing["balance"], standing["available"], standing["reserved"]) == (70, 70, 30)
    assert hub.payouts.standing(friend)["balance"] == 0
    hub.now += HOLD
    assert hub.payouts.standing(friend)["balance"] == 30
    assert hub.payouts.standing(friend)["available"] == 0, "what came in just now is held as well"
    hub.payouts.settle_due()
    assert hub.payouts.standing(account)["balance"] == 70
    assert hub.kinds().count("transfer-settled") == 1


def test_credits_younger_than_the_hold_cannot_be_moved(hub: Hub, owner: SigningKey) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    with pytest.raises(GymError, match="0 of 100 can be moved") as caught:
        hub.transfer(account, owner, friend, 1)
    assert caught.value.code is ErrorCode.TRANSFER_REFUSED


@pytest.mark.parametrize("rotates", [False, True], ids=["keeps-the-key", "rotates-first"])
def test_a_thief_moves_no_past_credit_within_the_hold(hub: Hub, owner: SigningKey, rotates: bool) -> None:
    account, accomplice = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 10 * HOLD
    stolen, thiefs = owner, SigningKey.generate()
    if rotates:
        hub.rotate(account, owner, thiefs)
        stolen = thiefs
    hub.transfer(account, stolen, accomplice, 100)
    hub.now += HOLD - 1
    assert hub.payouts.standing(accomplice)["balance"] == 0
    hub.revoke(account, owner)
    hub.now += 10 * HOLD
    assert hub.payouts.standing(accomplice)["balance"] == 0
    standing = hub.payouts.standing(account)
    assert (standing["balance"], standing["reserved"]) == (100, 0)
    assert [t["status"] for t in standing["transfers"]] == ["cancelled"]
    assert "transfer-cancelled" in hub.kinds()


def test_a_transfer_right_before_the_revocation_is_cancelled(hub: Hub, owner: SigningKey) -> None:
    account, accomplice = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 10 * HOLD
    hub.transfer(account, owner, accomplice, 100)
    hub.revoke(account, owner)
    hub.keys.rebind(account, SigningKey.generate().public_key)
    hub.now += 10 * HOLD
    assert hub.payouts.standing(accomplice)["balance"] == 0
    assert hub.payouts.standing(account)["available"] == 100


def test_a_rotation_after_asking_starts_the_hold_anew(hub: Hub, owner: SigningKey) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    hub.transfer(account, owner, friend, 5)
    hub.now += HOLD / 2
    hub.rotate(account, owner, SigningKey.generate())
    hub.now += HOLD / 2
    assert hub.payouts.standing(friend)["balance"] == 0
    hub.now += HOLD / 2
    assert hub.payouts.standing(friend)["balance"] == 5


@pytest.mark.parametrize(
    ("amount", "to", "told"),
    [
        (0, "friend", "an amount of 0"),
        (-5, "friend", "an amount of -5"),
        (101, "friend", "100 of 100 can be moved"),
        (1, "self", "to itself"),
        (1, "c0000000000000000", "no contributor"),
    ],
    ids=["zero", "negative", "too-much", "self", "unknown"],
)
def test_a_transfer_that_cannot_be_is_refused_by_name(
    hub: Hub, owner: SigningKey, amount: int, to: str, told: str
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    recipient = {"friend": friend, "self": account}.get(to, to)
    with pytest.raises(GymError, match=told) as caught:
        hub.transfer(account, owner, recipient, amount)
    assert caught.value.code is ErrorCode.TRANSFER_REFUSED


def test_two_transfers_cannot_give_the_same_credits_and_one_order_counts_once(
    hub: Hub, owner: SigningKey
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    order = TransferOrder(sender=account, to=friend, amount=60, server=hub.server, issued_at=int(hub.now))
    signature = order.sign(owner)
    first = hub.payouts.ask(account, order.to_json(), signature)
    assert hub.payouts.ask(account, order.to_json(), signature) == first
    assert hub.code(hub.transfer, account, owner, friend, 60) is ErrorCode.TRANSFER_REFUSED
    assert hub.code(hub.payouts.ask, friend, order.to_json(), signature) is ErrorCode.SIGNATURE_INVALID


def test_only_updates_signed_by_the_revoked_key_are_kept_from_the_merge(hub: Hub, owner: SigningKey) -> None:
    account, new = hub.enrol(owner), SigningKey.generate()

    def row(name: str, key: SigningKey) -> SimpleNamespace:
        manifest = UpdateManifest(
            contributor=account,
            server=hub.server,
            task=name,
            server_round=1,
            base_digest="b",
            delta_sha256="0" * 64,
            delta_bytes=1,
            nonce=new_nonce(),
            issued_at_seconds=0,
            expires_at_seconds=1,
            num_examples=1,
        )
        text, signature = manifest.model_dump_json(), manifest.sign(key)
        return SimpleNamespace(update_id=name, contributor=account, manifest=text, signature=signature)

    rows = [row("by the old key", owner), row("by the new key", new)]
    assert hub.keys.signed_by_revoked(rows) == set()
    hub.revoke(account, owner)
    hub.keys.rebind(account, new.public_key)
    assert hub.keys.signed_by_revoked(rows) == {"by the old key"}


def test_the_ledger_tells_whoever_reads_it_which_key_was_good_when(hub: Hub, owner: SigningKey) -> None:
    account, second, third = hub.enrol(owner), SigningKey.generate(), SigningKey.generate()
    hub.rotate(account, owner, second)
    hub.revoke(account, second)
    hub.keys.rebind(account, third.public_key)
    entries = [{"kind": e.kind, "body": e.body} for e in hub.ledger.entries()]
    for number, key in ((1, owner), (2, second), (4, third)):
        assert key_at(entries[:number], account) == key.public_key
    assert hub.code(key_at, entries[:3], account) is ErrorCode.KEY_REVOKED
    assert hub.code(key_at, entries, "c0000000000000000") is ErrorCode.NOT_FOUND
    forged = [entries[0], {"kind": "rotated", "body": {**entries[1]["body"], "public_key": "00" * 32}}]
    assert hub.code(key_at, forged, account) is ErrorCode.STATE_CORRUPT


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (update(transfers).values(status="settled"), "transfers"),
        (update(transfers).values(amount=1), "transfers"),
        (delete(transfers), "transfers"),
        (update(accounts).values(status="active"), "accounts"),
        (update(accounts).where(accounts.c.status == "revoked").values(public_key=b"k" * 32), "keys"),
    ],
    ids=["settled", "amount", "deleted", "status", "key"],
)
def test_a_key_or_transfer_that_the_ledger_does_not_tell_of_is_found(
    hub: Hub, owner: SigningKey, change: Any, told: str
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(other := SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    hub.transfer(account, owner, friend, 40)
    hub.revoke(friend, other)
    assert hub.ledger.verify()["transfers"] == 1
    with hub.database.transaction() as tx:
        tx.execute(change)
    with pytest.raises(GymError, match=told) as caught:
        hub.ledger.verify()
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_hub_with_encrypted_keys_opens_with_the_passphrase_only(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encryption, "SCRYPT_N", 1 << 10)
    folder = tmp_path / "hub"
    server, _ = init_hub(folder, "n", str(tiny_base), "open", lambda: b"some long words")
    for name in ("ledger.pem", "tls.key"):
        assert (folder / "keys" / name).read_text().startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    monkeypatch.setenv("GYM_SERVER_PASSPHRASE", "some long words")
    with Federation.open(folder) as fed:
        assert fed.server == server
        assert b"BEGIN PRIVATE KEY" in private_pem(folder / "keys" / "tls.key", fed.passphrase.get)
    for given, told in (("wrong words", "does not open"), ("", "no terminal")):
        monkeypatch.setenv("GYM_SERVER_PASSPHRASE", given)
        with pytest.raises(GymError, match=told) as caught:
            Federation.open(folder)
        assert caught.value.code is ErrorCode.KEY_LOCKED
