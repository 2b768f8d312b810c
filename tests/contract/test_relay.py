"""A hub that copies another one's id, name and ledger gets nothing of what its contributors sign."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.hub.rotation import revoke, rotate
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_server.accounts.accounts import SESSION_SECONDS

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.relay import Relay


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "hub")
    yield hub
    hub.close()


@pytest.fixture
def relay(tmp_path: Path, hub: LoopbackHub) -> Iterator[Relay]:
    relay = Relay(tmp_path / "relay", hub.address, (hub.fed.folder / "keys" / "tls.crt").read_bytes())
    yield relay
    relay.close()


@pytest.fixture
def ann(tmp_path: Path, hub: LoopbackHub) -> Iterator[HubClient]:
    """A contributor of the true hub."""
    with hub.client(tmp_path / "ann") as client:
        yield client


@pytest.fixture
def victim(tmp_path: Path, relay: Relay, ann: HubClient) -> Iterator[HubClient]:
    """The same person on another machine, who has met the relay only."""
    home = Home.open(tmp_path / "laptop")
    shutil.copy(ann.home.folder / "key.pem", home.folder / "key.pem")
    with reach(home, relay.address, relay.fingerprint) as client:
        yield client


def reach(home: Home, where: str, fingerprint: str) -> HubClient:
    address = Address.parse(where)
    return HubClient(home, address, establish(home, address, fingerprint, lambda _: False))


def test_a_relayed_enrolment_and_a_relayed_login_are_refused_and_open_no_session(
    hub: LoopbackHub, relay: Relay, victim: HubClient, ann: HubClient
) -> None:
    assert victim.status().ledger_public_key == hub.fed.key.public_key, "the copy is perfect"
    entries = len(list(hub.fed.ledger.entries()))
    with pytest.raises(GymError, match="another hub") as caught:
        victim.enrol("ann")
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    victim.pin = victim.pin.but(contributor=ann.pin.contributor)
    with pytest.raises(GymError, match="another hub") as caught:
        victim.authenticate()
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    assert relay.sessions == [], (
        "with which the relay could fetch updates and leave in the contributor's name"
    )
    assert len(list(hub.fed.ledger.entries())) == entries
    assert ann.call("Account", pb.AccountRequest()).status == "active"


def test_a_relayed_rotation_and_a_relayed_revocation_change_no_key(
    hub: LoopbackHub, victim: HubClient, ann: HubClient
) -> None:
    victim.status()
    victim._repin(contributor=ann.pin.contributor)
    before = ann.home.key.public_key
    (outcome,) = revoke(victim.home)
    assert (outcome["revoked"], outcome["error"]["code"]) == (False, "stale")
    (outcome,) = rotate(victim.home)["servers"]
    assert (outcome["rotated"], outcome["error"]["code"]) == (False, "stale")
    assert "TLS key" in outcome["error"]["message"]
    assert hub.fed.accounts.public_key(ann.pin.contributor) == before


def test_a_copy_of_a_hub_that_the_home_knows_is_refused_with_both_addresses_and_the_remedy(
    hub: LoopbackHub, relay: Relay, ann: HubClient
) -> None:
    with reach(ann.home, relay.address, relay.fingerprint) as copy, pytest.raises(GymError) as caught:
        copy.status()
    assert caught.value.code is ErrorCode.SERVER_KEY_CHANGED
    for part in (hub.address, relay.address, hub.fed.fingerprint, relay.fingerprint):
        assert part in caught.value.message
    assert "delete" in caught.value.hint
    assert ann.status().ledger_public_key == hub.fed.key.public_key, "the true hub is reached as before"


def test_two_addresses_of_one_hub_with_one_tls_key_are_fine(hub: LoopbackHub, ann: HubClient) -> None:
    other = hub.address.replace("127.0.0.1", "localhost")
    with reach(ann.home, other, hub.fed.fingerprint) as client:
        assert client.status().ledger_public_key == hub.fed.key.public_key


def test_a_session_ends_with_leaving_though_the_account_comes_back(hub: LoopbackHub, ann: HubClient) -> None:
    ann.call("Account", pb.AccountRequest())
    session = ann._session
    assert hub.fed.accounts.session(session).contributor == ann.pin.contributor
    ann.call("Leave", pb.LeaveRequest())
    ann.enrol("ann")
    with pytest.raises(GymError) as caught:
        hub.fed.accounts.session(session)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert ann.call("Account", pb.AccountRequest()).status == "active"


def test_a_session_is_of_no_use_at_a_hub_with_another_tls_key_and_is_on_no_disk(
    tmp_path: Path, hub: LoopbackHub, ann: HubClient
) -> None:
    ann.call("Account", pb.AccountRequest())
    session = ann._session
    written = [path for path in ann.home.folder.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if session.encode() in path.read_bytes()]
    hub.fed.accounts._tls = "sha256:" + "0" * 64
    with pytest.raises(GymError) as caught:
        hub.fed.accounts.session(session)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED


def test_a_session_that_has_expired_ends_the_calls_that_it_began(hub: LoopbackHub, ann: HubClient) -> None:
    ann.call("Account", pb.AccountRequest())
    session = hub.fed.accounts.session(ann._session)
    hub.fed.accounts.check(session)
    long_ago = type(session)(
        session.contributor, session.node_id, session.public_key, session.expires - 86_400
    )
    with pytest.raises(GymError, match="expired"):
        hub.fed.accounts.check(long_ago)


def test_a_session_token_ends_with_its_time_and_no_hub_gives_one_for_longer(
    hub: LoopbackHub, ann: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < SESSION_SECONDS <= 3600
    ann.call("Account", pb.AccountRequest())
    session = ann._session
    begun = hub.fed.accounts.session(session).expires
    assert begun <= hub.fed.clock.now() + SESSION_SECONDS
    monkeypatch.setattr(hub.fed.clock, "wall", lambda: begun + 1)
    with pytest.raises(GymError, match="expired") as caught:
        hub.fed.accounts.session(session)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED


def test_a_session_token_ends_with_the_key_that_it_was_opened_under(hub: LoopbackHub, ann: HubClient) -> None:
    ann.call("Account", pb.AccountRequest())
    session, before = ann._session, hub.fed.accounts.public_key(ann.pin.contributor)
    (outcome,) = rotate(ann.home)["servers"]
    assert outcome["rotated"], outcome
    assert hub.fed.accounts.public_key(ann.pin.contributor) != before
    with pytest.raises(GymError) as caught:
        hub.fed.accounts.session(session)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
