"""Keys of accounts over time, and what a thief of one can do: nothing with past credits, within the hold period."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.accounts import keys
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.store.tables import key_refusals
from sqlalchemy import select

from gym_fed.config.hub.sections import LimitsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity import keys as identity_keys
from gym_fed.trust.identity.history import History, key_at
from gym_fed.trust.identity.keys import SigningKey, verify_signature
from gym_fed.trust.identity.manifest import UpdateManifest, new_nonce
from gym_fed.trust.identity.statements import Revocation, Rotation, TransferOrder
from gym_fed.trust.identity.tls import private_pem
from tests.support.balance_hub import HOLD, Hub


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


def test_refusals_of_a_revoked_key_are_recorded_once_per_round(hub: Hub, owner: SigningKey) -> None:
    account = hub.enrol(owner)
    hub.keys.revoke_as_coordinator(account, "sold")
    for call in ("Upload", "Submit", "Work"):
        hub.keys.refused(account, call)
    hub.earn(account, 1)  # another round
    hub.keys.refused(account, "Submit")
    message = [entry.body for entry in hub.ledger.entries() if entry.kind == "verdict"]
    assert [(t["server_round"], t["verdict"]) for t in message] == [(0, "refused"), (1, "refused")]
    assert message[0]["reason"] == "key-revoked: Upload with a revoked key"
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
    transfer = hub.transfer(account, owner, friend, 30)
    assert (transfer["status"], transfer["settles_at"]) == ("pending", int(hub.now + HOLD))
    balance = hub.payouts.balance_and_transfers(account)
    assert (balance["balance"], balance["available"], balance["reserved"]) == (70, 70, 30)
    assert hub.payouts.balance_and_transfers(friend)["balance"] == 0
    hub.now += HOLD
    assert hub.payouts.balance_and_transfers(friend)["balance"] == 30
    assert hub.payouts.balance_and_transfers(friend)["available"] == 0, (
        "what came in just now is held as well"
    )
    hub.payouts.settle_due()
    assert hub.payouts.balance_and_transfers(account)["balance"] == 70
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
    assert hub.payouts.balance_and_transfers(accomplice)["balance"] == 0
    hub.revoke(account, owner)
    hub.now += 10 * HOLD
    assert hub.payouts.balance_and_transfers(accomplice)["balance"] == 0
    balance = hub.payouts.balance_and_transfers(account)
    assert (balance["balance"], balance["reserved"]) == (100, 0)
    assert [t["status"] for t in balance["transfers"]] == ["cancelled"]
    assert "transfer-cancelled" in hub.kinds()


def test_a_transfer_right_before_the_revocation_is_cancelled(hub: Hub, owner: SigningKey) -> None:
    account, accomplice = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 10 * HOLD
    hub.transfer(account, owner, accomplice, 100)
    hub.revoke(account, owner)
    hub.keys.rebind(account, SigningKey.generate().public_key)
    hub.now += 10 * HOLD
    assert hub.payouts.balance_and_transfers(accomplice)["balance"] == 0
    assert hub.payouts.balance_and_transfers(account)["available"] == 100


def test_a_rotation_after_asking_starts_the_hold_anew(hub: Hub, owner: SigningKey) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    hub.transfer(account, owner, friend, 5)
    hub.now += HOLD / 2
    hub.rotate(account, owner, SigningKey.generate())
    hub.now += HOLD / 2
    assert hub.payouts.balance_and_transfers(friend)["balance"] == 0
    hub.now += HOLD / 2
    assert hub.payouts.balance_and_transfers(friend)["balance"] == 5


@pytest.mark.parametrize(
    ("amount", "to", "message"),
    [
        (0, "friend", "the amount is 0"),
        (-5, "friend", "the amount is -5"),
        (101, "friend", "100 of 100 can be moved"),
        (1, "self", "to itself"),
        (1, "c00000000000000000000000000000000", "no contributor"),
    ],
    ids=["zero", "negative", "too-much", "self", "unknown"],
)
def test_a_transfer_that_cannot_be_is_refused_by_name(
    hub: Hub, owner: SigningKey, amount: int, to: str, message: str
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    recipient = {"friend": friend, "self": account}.get(to, to)
    with pytest.raises(GymError, match=message) as caught:
        hub.transfer(account, owner, recipient, amount)
    assert caught.value.code is ErrorCode.TRANSFER_REFUSED


def test_two_transfers_cannot_give_the_same_credits_and_one_order_counts_once(
    hub: Hub, owner: SigningKey
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    order = TransferOrder(
        sender=account, to=friend, amount=60, server=hub.server, tls="", issued_at=int(hub.now)
    )
    signature = order.sign(owner)
    first = hub.payouts.request(account, order.to_json(), signature)
    assert hub.payouts.request(account, order.to_json(), signature) == first
    assert hub.code(hub.transfer, account, owner, friend, 60) is ErrorCode.TRANSFER_REFUSED
    assert hub.code(hub.payouts.request, friend, order.to_json(), signature) is ErrorCode.SIGNATURE_INVALID


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


def test_the_ledger_shows_its_readers_which_key_was_valid_when(hub: Hub, owner: SigningKey) -> None:
    account, second, third = hub.enrol(owner), SigningKey.generate(), SigningKey.generate()
    hub.rotate(account, owner, second)
    hub.revoke(account, second)
    hub.keys.rebind(account, third.public_key)
    entries = [{"kind": e.kind, "body": e.body} for e in hub.ledger.entries()]
    for number, key in ((1, owner), (2, second), (4, third)):
        assert key_at(entries[:number], account) == key.public_key
    assert hub.code(key_at, entries[:3], account) is ErrorCode.KEY_REVOKED
    assert hub.code(key_at, entries, "c00000000000000000000000000000000") is ErrorCode.NOT_FOUND
    wrong = [entries[0], {"kind": "rotated", "body": {**entries[1]["body"], "public_key": "00" * 32}}]
    assert hub.code(key_at, wrong, account) is ErrorCode.STATE_CORRUPT


def test_a_shorter_hold_period_is_not_for_transfers_that_were_asked_for_before(
    hub: Hub, owner: SigningKey
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    promised = hub.transfer(account, owner, friend, 40)["settles_at"]
    hub.payouts._hold = 0.0  # as after a restart with another rewards.hold_seconds
    assert hub.payouts.balance_and_transfers(friend)["balance"] == 0
    assert hub.payouts.balance_and_transfers(account)["transfers"][0]["settles_at"] == promised
    hub.now += HOLD + 1
    assert hub.payouts.balance_and_transfers(friend)["balance"] == 40
    assert hub.ledger.verify()["transfers"] == 1


def test_a_key_that_is_revoked_while_the_account_leaves_stays_revoked(hub: Hub, owner: SigningKey) -> None:
    account = hub.enrol(owner)
    hub.revoke(account, owner)
    assert hub.code(hub.accounts.leave, account) is ErrorCode.KEY_REVOKED


def test_a_statement_of_no_time_at_all_is_refused(hub: Hub, owner: SigningKey) -> None:
    account = hub.enrol(owner)
    with pytest.raises(ValueError, match="issued_at"):
        Revocation(revoke=account, key=owner.public_key.hex(), server=hub.server, issued_at=10**400)


def test_a_hub_with_encrypted_keys_opens_with_the_passphrase_only(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_keys, "SCRYPT_N", 1 << 10)
    folder = tmp_path / "hub"
    server, _ = init_hub(folder, HubChoices(str(tiny_base), "n", "open"), lambda: b"some long words")
    for name in ("ledger.pem", "tls.key", "session.key"):
        assert (folder / "keys" / name).read_text().startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    monkeypatch.setenv("GYM_SERVER_PASSPHRASE", "some long words")
    with Federation.open(folder) as fed:
        assert fed.server == server
        assert b"BEGIN PRIVATE KEY" in private_pem(folder / "keys" / "tls.key", fed.passphrase.get)
    for given, message in (("wrong words", "does not decrypt"), ("", "no terminal")):
        monkeypatch.setenv("GYM_SERVER_PASSPHRASE", given)
        with pytest.raises(GymError, match=message) as caught:
            Federation.open(folder)
        assert caught.value.code is ErrorCode.KEY_LOCKED


def test_a_missing_session_key_is_created_under_the_passphrase_of_the_ledger_key_and_sessions_end(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_keys, "SCRYPT_N", 1 << 10)
    monkeypatch.setenv("GYM_SERVER_PASSPHRASE", "some long words")
    folder = tmp_path / "hub"
    init_hub(folder, HubChoices(str(tiny_base), "n", "open"), lambda: b"some long words")
    path = folder / "keys" / "session.key"
    with Federation.open(folder) as fed:
        secret = fed.accounts._session_key
    assert path.read_text().startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    with Federation.open(folder) as fed:
        assert fed.accounts._session_key == secret
    path.unlink()
    with Federation.open(folder) as fed:
        assert fed.accounts._session_key != secret, "every session has ended"
    assert path.read_text().startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
    path.write_bytes(b"no key")
    with pytest.raises(GymError, match="readable") as caught:
        Federation.open(folder)
    assert (caught.value.code, caught.value.hint[:15]) == (ErrorCode.STATE_CORRUPT, "delete the file")


def test_an_account_that_replaces_its_key_without_end_is_slowed_down_and_its_revocation_stays_short(
    hub: Hub, owner: SigningKey
) -> None:
    account, key = hub.enrol(owner), owner
    most = LimitsConfig().account_changes_per_hour
    for _ in range(most - 1):  # the enrolment was the first
        fresh = SigningKey.generate()
        hub.rotate(account, key, fresh)
        key = fresh
    entries = len(hub.kinds())
    assert hub.code(hub.rotate, account, key, SigningKey.generate()) is ErrorCode.BUSY
    assert len(hub.kinds()) == entries
    assert hub.log_in(account, key).contributor == account
    hub.revoke(account, key)  # is never waited with
    body = next(entry.body for entry in hub.ledger.entries() if entry.kind == "revoked")
    assert len(body["also_revoked"]) <= most


def test_after_an_hour_a_key_can_be_replaced_again(hub: Hub, owner: SigningKey) -> None:
    account, key = hub.enrol(owner), owner
    for _ in range(LimitsConfig().account_changes_per_hour - 1):
        fresh = SigningKey.generate()
        hub.rotate(account, key, fresh)
        key = fresh
    hub.now += 3601
    hub.rotate(account, key, SigningKey.generate())


def test_an_account_that_leaves_and_comes_back_without_end_is_slowed_down(
    hub: Hub, owner: SigningKey
) -> None:
    account = hub.enrol(owner)
    for _ in range(LimitsConfig().account_changes_per_hour - 1):
        hub.accounts.leave(account)
        hub.enrol(owner)
    hub.accounts.leave(account)
    assert hub.code(hub.enrol, owner) is ErrorCode.BUSY
    assert (
        hub.kinds().count("enrolled") == hub.kinds().count("left") == LimitsConfig().account_changes_per_hour
    )
    hub.enrol(SigningKey.generate())  # nobody else waits


def test_transfers_beyond_an_hour_s_share_wait_and_those_that_come_in_do_not_count(
    hub: Hub, owner: SigningKey
) -> None:
    most, key = LimitsConfig().transfers_per_hour, SigningKey.generate()
    sender, other = hub.enrol(owner), hub.enrol(key)
    hub.earn(sender, 2 * most)
    hub.earn(other, 1)
    hub.now += HOLD + 1
    for _ in range(most):
        hub.transfer(sender, owner, other, 1)
    entries = len(hub.kinds())
    assert hub.code(hub.transfer, sender, owner, other, 1) is ErrorCode.BUSY
    assert len(hub.kinds()) == entries
    hub.transfer(other, key, sender, 1)
    hub.now += 3601
    hub.transfer(sender, owner, other, 1)


def test_a_signature_that_does_not_fit_is_held_against_few_former_keys(
    hub: Hub, owner: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, key = hub.enrol(owner), owner
    for _ in range(30):
        hub.now += 3601
        fresh = SigningKey.generate()
        hub.rotate(account, key, fresh)
        key = fresh
    tried: list[bytes] = []

    def verify(public_key: bytes, signed: object, signature: bytes) -> None:
        tried.append(public_key)
        verify_signature(public_key, signed, signature)

    checked = SimpleNamespace(public_key=key.public_key, contributor=account, status="active")
    monkeypatch.setattr(keys, "verify_signature", verify)
    with hub.database.reading() as tx:
        assert hub.code(keys.check_signer, tx, checked, {}, bytes(64)) is ErrorCode.SIGNATURE_INVALID
    assert len(tried) <= 21


def test_a_rotation_that_the_new_key_did_not_sign_changes_nothing(hub: Hub, owner: SigningKey) -> None:
    """Else an account could be bound to a key that somebody else has, or nobody."""
    account, new = hub.enrol(owner), SigningKey.generate()
    said = Rotation(
        rotate=account, new_key=new.public_key.hex(), server=hub.server, tls="", issued_at=int(hub.now)
    )
    for signature in (said.sign(owner), said.sign(SigningKey.generate()), bytes(64), b""):
        code = hub.code(hub.keys.rotate, said.to_json(), said.sign(owner), new.public_key, signature)
        assert code is ErrorCode.SIGNATURE_INVALID
    assert hub.kinds() == ["enrolled"]
    assert hub.log_in(account, owner).contributor == account


def test_a_rotation_in_a_ledger_that_the_new_key_did_not_sign_is_found_by_its_readers(
    hub: Hub, owner: SigningKey
) -> None:
    account, new = hub.enrol(owner), SigningKey.generate()
    hub.rotate(account, owner, new)
    entries = [{"kind": e.kind, "body": dict(e.body)} for e in hub.ledger.entries()]
    assert key_at(entries, account) == new.public_key
    body = entries[-1]["body"]
    body["new_signature"] = body["signature"]  # the old key's
    with pytest.raises(GymError, match="not signed by both keys"):
        key_at(entries, account)


@pytest.mark.parametrize("changes", [{"amount": 7}, {"to": "another"}], ids=["amount", "recipient"])
def test_a_nonce_of_an_earlier_transfer_is_refused_for_another_one(
    hub: Hub, owner: SigningKey, changes: dict[str, Any]
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    another = hub.enrol(SigningKey.generate())
    hub.earn(account, 100)
    hub.now += 2 * HOLD
    said = {"amount": 5, "to": friend, "nonce": new_nonce()}

    def ask(**values: Any) -> Any:
        order = TransferOrder(
            sender=account, server=hub.server, tls="", issued_at=int(hub.now), **{**said, **values}
        )
        return hub.payouts.request(account, order.to_json(), order.sign(owner))

    ask()
    if "to" in changes:
        changes = {"to": another}
    assert hub.code(lambda: ask(**changes)) is ErrorCode.REPLAYED
    assert hub.kinds().count("transfer") == 1
    assert hub.payouts.balance_and_transfers(account)["reserved"] == 5


def test_a_ledger_in_which_a_nonce_moves_credits_twice_is_found_by_its_readers(
    hub: Hub, owner: SigningKey
) -> None:
    account, friend = hub.enrol(owner), hub.enrol(SigningKey.generate())
    history = History(hub.server)
    for entry in hub.ledger.entries():
        history.add(entry.kind, entry.body)
    nonce = new_nonce()
    for amount in (5, 7):
        order = TransferOrder(
            sender=account,
            to=friend,
            amount=amount,
            nonce=nonce,
            server=hub.server,
            tls="",
            issued_at=int(hub.now),
        )
        body = {
            "transfer": order.digest,
            "from": account,
            "to": friend,
            "amount": amount,
            "hold_seconds": HOLD,
        }
        body |= {"statement": order.signed(), "signature": order.sign(owner).hex(), "at": int(hub.now)}
        if amount == 5:
            history.add("transfer", body)
    with pytest.raises(GymError, match="recorded before"):
        history.add("transfer", body)
