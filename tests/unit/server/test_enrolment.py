"""Who may become a contributor: protocol, proof of work, attempts, ids that collide, and what 0.1 left behind."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gym_client.cli.join import join
from gym_client.cli.join_options import JoinOptions
from gym_client.cli.terminal import Consent
from gym_client.display import Display
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin
from gym_server.rpc.limits import ADDRESSES, EnrolmentLimits

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity import history
from gym_fed.trust.identity.history import History
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.login import MAX_WORK_BITS, do_work, enrolment_claim, login_claim, work_is_done
from gym_fed.trust.wire.limits import PROTOCOL
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support import balance_hub
from tests.support.contributor import RawContributor
from tests.support.loopback_hub import LoopbackHub
from tests.support.tiny_hub import TinyHub

SLOW = {"calls_per_second": 50, "enrolment_work_bits": 10, "enrolments_per_minute": 1}


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[TinyHub]:
    hub = TinyHub(tmp_path / "tiny").start()
    yield hub
    hub.stop()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "hub", limits=SLOW)
    yield hub
    hub.close()


class Nobody(Consent):
    """Is not to be asked about terms."""

    def base(self, offer: Any) -> bool:
        raise AssertionError("asked for consent")

    def offer(self, offer: Any) -> bool:
        raise AssertionError("asked for consent")


def refused(code: ErrorCode, call: Any, *arguments: Any) -> GymError:
    with pytest.raises(GymError) as caught:
        call(*arguments)
    assert caught.value.code is code, caught.value
    return caught.value


# ---- protocol ----


@pytest.mark.parametrize(
    ("protocol", "version", "remedy"),
    [
        (0, "0.1.0", "gym-fed 0.1.0"),
        (PROTOCOL + 1, "9.0", "install gym-fed 9.0 on this machine"),
        (0, "\x1b[2J", "the version that"),
    ],
)
def test_a_hub_of_another_protocol_is_refused_with_the_remedy_before_consent(
    tmp_path: Path, tiny: TinyHub, protocol: int, version: str, remedy: str
) -> None:
    tiny.protocol, tiny.software_version = protocol, version
    home, options = (
        Home.open(tmp_path / "home"),
        JoinOptions(server=tiny.address, fingerprint=tiny.fingerprint),
    )
    error = refused(ErrorCode.PROTOCOL_MISMATCH, join, home, options, Nobody(), Display())
    assert f"this hub speaks protocol {protocol} (gym-fed " in error.message
    assert remedy in error.hint
    assert "\x1b" not in str(error)
    pin = ServerPin.load(home, Address.parse(tiny.address))
    assert pin is not None
    assert (pin.server, tiny.enrolled) == ("", {})


@pytest.mark.parametrize("protocol", [0, 1, PROTOCOL + 1])
def test_a_contributor_of_another_protocol_is_refused_with_the_remedy(
    hub: LoopbackHub, protocol: int
) -> None:
    raw = RawContributor(hub.address)
    key = raw.key
    enrol = pb.EnrolRequest(
        public_key=key.public_key,
        name="n",
        signature=key.sign(enrolment_claim("n", "", raw.server, raw.tls)),
        work=do_work(raw.server, key.public_key, 10),
        protocol=protocol,
    )
    error = refused(ErrorCode.PROTOCOL_MISMATCH, raw.call, raw.stub.Enrol, enrol)
    assert ("the hub is older" if protocol > PROTOCOL else "install gym-fed") in error.hint
    assert "docs/install.md" in error.hint
    signed = key.sign(login_claim(key.contributor, "instance1", int(time.time()), "n", raw.server, raw.tls))
    login = pb.AuthenticateRequest(
        contributor=key.contributor,
        instance="instance1",
        issued_at_seconds=int(time.time()),
        nonce="n",
        signature=signed,
        protocol=protocol,
    )
    refused(ErrorCode.PROTOCOL_MISMATCH, raw.call, raw.stub.Authenticate, login)
    raw.close()


# ---- proof of work and attempts ----


def test_an_open_hub_wants_proof_of_work_before_it_writes_anything(hub: LoopbackHub) -> None:
    raw = RawContributor(hub.address)
    key, bits = raw.key, raw.status.enrolment_work_bits
    assert bits == 10
    claim = key.sign(enrolment_claim("n", "", raw.server, raw.tls))
    of_another = do_work(raw.server, SigningKey.generate().public_key, bits)
    for work in (b"", of_another, b"\0" * 4096):
        if work_is_done(raw.server, key.public_key, work, bits):
            continue  # one in 1024
        request = pb.EnrolRequest(
            public_key=key.public_key, name="n", signature=claim, protocol=PROTOCOL, work=work
        )
        refused(ErrorCode.PERMISSION_DENIED, raw.call, raw.stub.Enrol, request)
    assert list(hub.fed.ledger.entries()) == []
    assert hub.fed.accounts.is_new(key.public_key)
    assert raw.enrol().session
    raw.close()


def test_a_contributor_does_no_more_work_than_any_hub_needs_and_stops_when_asked() -> None:
    refused(ErrorCode.POLICY_REFUSED, do_work, "s", b"k" * 32, MAX_WORK_BITS + 1)
    refused(ErrorCode.INTERRUPTED, do_work, "s", b"k" * 32, MAX_WORK_BITS, lambda: True)


def test_an_address_that_makes_many_accounts_is_slowed_down_and_known_keys_are_not(hub: LoopbackHub) -> None:
    made = [RawContributor(hub.address, f"n{i}").enrol() for i in range(4)]
    late = RawContributor(hub.address, "late")
    error = refused(ErrorCode.BUSY, late.enrol)
    assert "127.0.0.1" in error.message
    assert made[0].enrol().session, "an account comes back whenever it likes"
    assert len(list(hub.fed.ledger.entries())) == 4
    for raw in (*made, late):
        raw.close()


def test_guesses_of_invites_are_slowed_down_before_they_are_looked_up(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub", limits=SLOW, enrolment={"policy": "invite"})
    invites = [hub.fed.accounts.invite("", 3600) for _ in range(6)]
    invited = [RawContributor(hub.address, f"n{i}").enrol(invites[i]) for i in range(5)]
    assert invited[0].status.enrolment_work_bits == 0, "an invite is worth more than work"
    guesser = RawContributor(hub.address, "guesser")
    for guess in range(4):
        refused(ErrorCode.INVITE_INVALID, guesser.enrol, f"{guess:032x}")
    refused(ErrorCode.BUSY, guesser.enrol, f"{9:032x}")
    refused(ErrorCode.BUSY, guesser.enrol, invites[5])
    assert len(list(hub.fed.ledger.entries())) == 5
    for raw in (*invited, guesser):
        raw.close()
    hub.close()


def test_guesses_from_many_addresses_keep_out_nobody_with_an_invite() -> None:
    limits = EnrolmentLimits(1, is_open=False, clock=lambda: 0.0)
    for number in range(100 * ADDRESSES):
        with pytest.raises(ValueError, match="guess"), limits.attempt(f"10.0.{number // 250}.{number % 250}"):
            raise ValueError("a wrong guess")
    with limits.attempt("192.0.2.1"):
        pass


def test_an_open_hub_takes_a_bounded_number_of_accounts_from_all_addresses_together() -> None:
    time = [0.0]
    limits, taken = EnrolmentLimits(1, is_open=True, clock=lambda: time[0]), 0
    for number in range(1000):
        with suppress(GymError), limits.attempt(f"10.0.{number // 250}.{number % 250}") as admit:
            admit()
            taken += 1
    assert taken == 4 * ADDRESSES
    time[0] = 60.0
    with limits.attempt("192.0.2.1") as admit:
        admit()


def test_attempts_without_work_or_signature_use_up_no_share_of_an_open_hub(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = iter(range(10_000))
    monkeypatch.setattr(  # each call comes from another address
        "gym_server.rpc.calls.current_address", lambda: f"10.1.{(n := next(number)) // 250}.{n % 250}"
    )
    raw = RawContributor(hub.address, "somebody")
    key = SigningKey.generate()
    work = do_work(raw.server, key.public_key, raw.status.enrolment_work_bits)
    good = key.sign(enrolment_claim("n", "", raw.server, raw.tls))
    for done, signature, code in (
        (b"", good, ErrorCode.PERMISSION_DENIED),
        (work, bytes(64), ErrorCode.SIGNATURE_INVALID),
    ):
        request = pb.EnrolRequest(
            public_key=key.public_key, name="n", signature=signature, protocol=PROTOCOL, work=done
        )
        for _ in range(4 * ADDRESSES):
            refused(code, raw.call, raw.stub.Enrol, request)
    assert raw.enrol().session, "a newcomer who did the work waits for nobody"
    raw.close()


# ---- ids ----


def test_a_second_key_with_the_id_of_an_account_is_refused_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(public_key: bytes) -> str:
        return "c" + hashlib.sha256(public_key).hexdigest()[:2] + "0" * 30

    monkeypatch.setattr("gym_server.accounts.accounts.contributor_id", short)
    monkeypatch.setattr(history, "contributor_id", short)
    hub, first = balance_hub.Hub(tmp_path), SigningKey.generate()
    account = hub.enrol(first, "first")
    second = next(k for k in iter(SigningKey.generate, None) if short(k.public_key) == account)
    refused(ErrorCode.PERMISSION_DENIED, hub.enrol, second, "second")
    with hub.database.transaction() as tx:
        tx.exec_driver_sql("UPDATE accounts SET status = 'left'")
    refused(ErrorCode.PERMISSION_DENIED, hub.enrol, second, "second")
    assert hub.kinds() == ["enrolled"]
    entries = [(entry.kind, entry.body) for entry in hub.ledger.entries()]
    keys = History(hub.server)
    for kind, body in entries:
        keys.add(kind, body)
    assert keys.current(account) == first.public_key
    forged = {**entries[0][1], "public_key": second.public_key.hex()}
    refused(ErrorCode.STATE_CORRUPT, keys.add, "enrolled", forged)
    assert keys.current(account) == first.public_key
