"""The lines that a coordinator and a contributor type, by who may join and where the hub listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gym_server.cli.setup import join_commands, notes_after_init, short_join_command

from gym_fed.config.hub.server import ServerConfig

KEY = "sha256:" + 64 * "0"


def lines(fingerprint: str = KEY, port: int = 9443, folder: str = "hub", **settings: Any) -> dict[str, str]:
    return dict(join_commands(Path(folder), ServerConfig.model_validate(settings), fingerprint, port))


def test_a_hub_that_names_no_address_for_others_says_so_instead_of_a_line_that_fails() -> None:
    found = lines(listen="0.0.0.0:9443")
    assert found == {
        "nobody can join yet": "set advertise: HOST:PORT in hub/gym-server.yaml, this machine's address for others"
    }


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"listen": "127.0.0.1:0"}, "127.0.0.1:7777"),
        ({"listen": "192.168.1.5:9443"}, "192.168.1.5:9443"),
        ({"listen": "[::]:9443", "advertise": "[2001:db8::1]:443"}, "[2001:db8::1]:443"),
    ],
)
def test_an_open_hub_shows_a_line_that_names_its_address_and_key(
    settings: dict[str, str], address: str
) -> None:
    (line,) = lines(port=7777, enrolment={"policy": "open"}, **settings).values()
    assert line == f"gym-client join --server {address} --data FILE --fingerprint {KEY}"


def test_plain_text_is_named_in_the_line() -> None:
    assert lines("", enrolment={"policy": "open"}) == {
        "on this machine type": "gym-client join --server 127.0.0.1:9443 --data FILE --insecure"
    }


def test_the_short_line_of_an_invite_is_the_coordinators_and_takes_any_folder() -> None:
    steps = join_commands(Path("our hub"), ServerConfig(advertise="hub.example.org:9443"), KEY)
    assert short_join_command(steps) == "invite a friend: gym-server invites create --dir 'our hub'"
    assert steps[1] == ("a friend types", "gym-client join --invite INVITE --data FILE")


def test_the_short_line_of_an_open_hub_leaves_the_key_to_the_clients_question() -> None:
    steps = join_commands(Path("hub"), ServerConfig.model_validate({"enrolment": {"policy": "open"}}), KEY)
    assert short_join_command(steps).endswith("gym-client join --server 127.0.0.1:9443 --data FILE")


def test_a_base_that_the_hub_does_not_serve_is_named_with_the_option_that_friends_need(
    tiny_base: Path,
) -> None:
    def unserved(**settings: Any) -> list[str]:
        config = ServerConfig.model_validate({"base_model": str(tiny_base), **settings})
        return [note for note in notes_after_init(config) if "--base FOLDER" in note]

    assert len(unserved()) == 1
    assert unserved(serve_base=True) == []
    assert unserved(base_model="gym-nano") == []
