"""A hub is known by its key: pinned at first sight, vouched for by an invite, refused when it changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from gym_client.cli.join_options import JoinOptions, find_target
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin
from gym_client.identity.trust import establish

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.login import Invite, format_invite
from tests.support.tiny_hub import TinyHub


class Person:
    """Answers the question about a key, and counts how often it was asked."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.asked: list[str] = []

    def __call__(self, fingerprint: str) -> bool:
        self.asked.append(fingerprint)
        return self.answer


def refused(code: ErrorCode, home: Home, hub: TinyHub, expected: str | None = None, yes: bool = True) -> str:
    with pytest.raises(GymError) as caught:
        establish(home, Address.parse(hub.address), expected, Person(yes))
    assert caught.value.code is code, caught.value
    return str(caught.value)


def test_a_person_is_asked_once_and_the_key_is_pinned(home: Home, hub: TinyHub) -> None:
    address, person = Address.parse(hub.address), Person()
    pin = establish(home, address, None, person)
    assert person.asked == [hub.fingerprint] == [pin.fingerprint]
    establish(home, address, None, person)
    assert len(person.asked) == 1


def test_a_declined_key_is_not_pinned(home: Home, hub: TinyHub) -> None:
    refused(ErrorCode.PERMISSION_DENIED, home, hub, yes=False)
    assert ServerPin.load(home, Address.parse(hub.address)) is None


def test_a_fingerprint_from_elsewhere_replaces_the_question(home: Home, hub: TinyHub) -> None:
    person = Person(False)
    establish(home, Address.parse(hub.address), hub.fingerprint, person)
    assert person.asked == []


def test_another_key_than_the_expected_one_is_refused(home: Home, hub: TinyHub) -> None:
    message = refused(ErrorCode.SERVER_KEY_CHANGED, home, hub, "sha256:" + "0" * 64)
    assert hub.fingerprint in message
    assert ServerPin.load(home, Address.parse(hub.address)) is None


def test_a_changed_key_is_refused_with_both_fingerprints(home: Home, hub: TinyHub) -> None:
    establish(home, Address.parse(hub.address), None, Person())
    before = hub.fingerprint
    hub.stop()
    hub.change_key()
    hub.start()
    message = refused(ErrorCode.SERVER_KEY_CHANGED, home, hub)
    assert before in message
    assert hub.fingerprint in message


def test_a_key_that_changes_while_the_agent_waits_is_noticed(home: Home, hub: TinyHub) -> None:
    client = HubClient(
        home, Address.parse(hub.address), establish(home, Address.parse(hub.address), None, Person())
    )
    client.status()
    hub.stop()
    client.check_key()  # away is not changed
    hub.change_key()
    hub.start()
    with pytest.raises(GymError) as caught:
        client.check_key()
    assert caught.value.code is ErrorCode.SERVER_KEY_CHANGED
    client.close()


def test_a_pinned_hub_that_is_down_is_trusted_again_when_it_returns(home: Home, hub: TinyHub) -> None:
    address = Address.parse(hub.address)
    pin = establish(home, address, None, Person())
    hub.stop()
    assert establish(home, address, None, Person()) == pin
    hub.start()


def test_an_unknown_hub_that_is_down_is_unavailable(home: Home, hub: TinyHub) -> None:
    hub.stop()
    assert hub.address in refused(ErrorCode.UNAVAILABLE, home, hub)
    hub.start()


def test_a_hub_with_another_ledger_key_behind_the_same_tls_key_is_refused(home: Home, hub: TinyHub) -> None:
    address = Address.parse(hub.address)
    with HubClient(home, address, establish(home, address, None, Person())) as client:
        client.status()
        hub.key = SigningKey.generate()
        with pytest.raises(GymError) as caught:
            client.status()
    assert caught.value.code is ErrorCode.SERVER_KEY_CHANGED


def test_plain_text_is_for_loopback_only(home: Home) -> None:
    with pytest.raises(GymError, match="loopback") as caught:
        establish(home, Address.parse("192.0.2.1:9443"), None, Person(), insecure=True)
    assert caught.value.code is ErrorCode.USAGE


def test_a_plain_text_meeting_vouches_for_no_key(home: Home, hub: TinyHub, tmp_path: Path) -> None:
    address, person = Address.parse(hub.address), Person()
    assert establish(home, address, None, person, insecure=True).fingerprint == ""
    assert establish(home, address, None, person).fingerprint == hub.fingerprint
    assert person.asked == [hub.fingerprint]


def test_a_hub_in_plain_text_is_said_to_be_that(home: Home, tmp_path: Path) -> None:
    plain = TinyHub(tmp_path / "plain", insecure=True).start()
    assert "--insecure" in refused(ErrorCode.UNAVAILABLE, home, plain)
    plain.stop()


def test_an_invite_stands_for_address_fingerprint_and_token() -> None:
    invite = Invite("hub.example.org", 4433, "sha256:" + "a" * 64, "b" * 32)
    target = find_target(JoinOptions(invite=format_invite(invite)))
    assert (str(target.address), target.fingerprint, target.token) == (
        "hub.example.org:4433",
        invite.fingerprint,
        "b" * 32,
    )
    moved = find_target(JoinOptions(server="other:1", invite=format_invite(invite)))
    assert str(moved.address) == "other:1"
    bare = find_target(JoinOptions(server="other:1", invite="b" * 32))
    assert (bare.fingerprint, bare.token) == (None, "b" * 32)


def test_an_invite_and_a_fingerprint_that_disagree_are_refused() -> None:
    text = format_invite(Invite("h", 1, "sha256:" + "a" * 64, "b" * 32))
    with pytest.raises(GymError) as caught:
        find_target(JoinOptions(invite=text, fingerprint="sha256:" + "c" * 64))
    assert caught.value.code is ErrorCode.USAGE
    with pytest.raises(GymError, match="--server"):
        find_target(JoinOptions())
