"""A home knows its hubs: the last one that was joined, the only one, and one that was left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.cli.join import enter
from gym_client.cli.join_options import JoinOptions, find_target
from gym_client.hub.known import LAST_SERVER, address_of, enrolled_client, last_address
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.tiny_hub import TinyHub


@pytest.fixture
def hubs(tmp_path: Path) -> Iterator[list[TinyHub]]:
    found = [TinyHub(tmp_path / name).start() for name in ("one", "two")]
    yield found
    for hub in found:
        hub.stop()


def joined(home: Home, hub: TinyHub) -> None:
    address = Address.parse(hub.address)
    with HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False)) as client:
        enter(client, "me", "")
    home.remember(**{LAST_SERVER: hub.address})


def test_the_only_hub_needs_no_server(tmp_path: Path, hubs: list[TinyHub]) -> None:
    home = Home.open(tmp_path / "home")
    assert last_address(home) is None
    with pytest.raises(GymError, match="never joined"):
        address_of(home, None)
    joined(home, hubs[0])
    assert str(address_of(home, None)) == hubs[0].address
    assert find_target(JoinOptions(), last_address(home)).address == Address.parse(hubs[0].address)


def test_an_account_of_0_1_without_a_remembered_hub_is_found_by_its_pin(
    tmp_path: Path, hubs: list[TinyHub]
) -> None:
    home = Home.open(tmp_path / "home")
    joined(home, hubs[0])
    home.remember(**{LAST_SERVER: None})
    assert str(last_address(home)) == hubs[0].address


def test_several_hubs_are_listed_and_join_goes_on_at_the_last(tmp_path: Path, hubs: list[TinyHub]) -> None:
    home = Home.open(tmp_path / "home")
    for hub in hubs:
        joined(home, hub)
    assert str(last_address(home)) == hubs[1].address
    with pytest.raises(GymError) as caught:
        address_of(home, None)
    assert caught.value.code is ErrorCode.USAGE
    assert f"{hubs[0].address} (tiny)" in caught.value.message
    assert f"{hubs[1].address} (tiny, joined last)" in caught.value.message


def test_a_server_that_is_named_wins_over_the_last(tmp_path: Path, hubs: list[TinyHub]) -> None:
    home = Home.open(tmp_path / "home")
    joined(home, hubs[0])
    target = find_target(JoinOptions(server=hubs[1].address), last_address(home))
    assert str(target.address) == hubs[1].address
    with pytest.raises(GymError, match="no server given"):
        find_target(JoinOptions(invite="a-token"))


def test_a_hub_that_was_left_is_known_to_those_who_may_ask_it(tmp_path: Path, hubs: list[TinyHub]) -> None:
    home = Home.open(tmp_path / "home")
    joined(home, hubs[0])
    with enrolled_client(home, None, False) as client:
        client.forget_enrolment()
    with pytest.raises(GymError, match="has left") as caught:
        enrolled_client(home, None, False)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    with enrolled_client(home, None, False, may_have_left=True) as client:
        assert client.pin.account
