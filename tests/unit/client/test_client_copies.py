"""A home on a second machine, a hub under a second name, and names that are not UTF-8."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.cli.join_options import JoinOptions, remembered
from gym_client.hub import rotation
from gym_client.hub.known import address_of, enrolled_client
from gym_client.hub.transport import HubClient
from gym_client.identity import copies
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import with_account
from gym_client.identity.trust import establish

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.loopback_hub import LoopbackHub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "hub")
    yield hub
    hub.close()


def on_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"machine-{name}"
    path.write_text(f"{name}\n")
    monkeypatch.setattr(copies, "MACHINE_ID", path)


def test_a_home_that_was_copied_to_a_second_machine_is_another_node_of_the_same_account(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine("first", tmp_path, monkeypatch)
    with hub.client(tmp_path / "ann") as first:
        assert copies.adopt_copy(first.home) == ""
        (first.home.tasks / "begun").mkdir()
        shutil.copytree(tmp_path / "ann", tmp_path / "copy")
        on_machine("second", tmp_path, monkeypatch)
        copy = Home.open(tmp_path / "copy")
        note = copies.adopt_copy(copy)
        assert "was copied from another machine" in note
        assert "1 unfinished task stayed with the original" in note
        assert copies.adopt_copy(copy) == "", "once"
        assert list(copy.tasks.iterdir()) == []
        assert (first.home.tasks / "begun").is_dir()
        with hub.client(tmp_path / "copy") as second:
            assert second.pin.contributor == first.pin.contributor
            assert second.node_id != first.node_id


def mounted(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mountinfo"
    point = str(folder).replace(" ", "\\040")
    path.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        f"40 22 0:50 / {point} rw,relatime shared:2 - {kind} server:/export rw\n"
    )
    monkeypatch.setattr(copies, "MOUNTS", path)


def test_a_home_on_a_shared_file_system_keeps_its_tasks_and_says_that_another_machine_used_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted("nfs4", tmp_path / "net work", tmp_path, monkeypatch)
    on_machine("first", tmp_path, monkeypatch)
    home = Home.open(tmp_path / "net work" / "ann")
    instance = home.instance
    assert copies.adopt_copy(home) == ""
    (home.tasks / "begun").mkdir()
    for name in ("second", "first"):
        on_machine(name, tmp_path, monkeypatch)
        note = copies.adopt_copy(home)
        assert "is shared with another machine, which used it last. Its tasks continue here" in note
        assert "one machine at a time" in note
        assert copies.adopt_copy(home) == "", "once"
        assert (home.tasks / "begun").is_dir()
        assert home.instance == instance


def test_a_disk_that_was_cloned_for_another_machine_holds_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted("xfs", tmp_path, tmp_path, monkeypatch)
    on_machine("first", tmp_path, monkeypatch)
    home = Home.open(tmp_path / "ann")
    instance = home.instance
    copies.adopt_copy(home)
    on_machine("clone", tmp_path, monkeypatch)
    assert "was copied from another machine" in copies.adopt_copy(home)
    assert home.instance != instance


def test_a_second_copy_of_a_home_on_one_machine_is_another_installation_and_the_first_keeps_its_tasks(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    with hub.client(tmp_path / "ann") as first:
        copies.adopt_copy(first.home)
        (first.home.tasks / "begun").mkdir()
        shutil.copytree(tmp_path / "ann", tmp_path / "copy")
        copy = Home.open(tmp_path / "copy")
        note = copies.adopt_copy(copy)
        assert f"was copied from {tmp_path / 'ann'}" in note
        assert "1 unfinished task stayed with the original" in note
        assert list(copy.tasks.iterdir()) == []
        assert copies.adopt_copy(first.home) == copies.adopt_copy(copy) == "", "once"
        assert (first.home.tasks / "begun").is_dir()
        with hub.client(tmp_path / "copy") as second:
            assert second.node_id != first.node_id


def test_a_home_that_was_moved_or_restored_keeps_its_tasks(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "ann")
    instance = home.instance
    copies.adopt_copy(home)
    (home.tasks / "begun").mkdir()
    shutil.copytree(tmp_path / "ann", tmp_path / "moved")
    shutil.rmtree(tmp_path / "ann")
    moved = Home.open(tmp_path / "moved")
    assert copies.adopt_copy(moved) == ""
    assert (moved.tasks / "begun").is_dir()
    assert moved.instance == instance


def test_a_home_is_no_copy_where_nothing_names_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MACHINE_ID", tmp_path / "absent")
    monkeypatch.setattr(copies.uuid, "getnode", lambda: 1 << 40)  # made up anew in every process
    home = Home.open(tmp_path / "home")
    instance = home.instance
    assert (copies.adopt_copy(home), home.instance) == ("", instance)


def test_a_hub_under_another_host_name_is_the_known_one_by_its_key_with_the_account_that_the_home_has(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    with hub.client(tmp_path / "ann") as first:
        account, home = first.pin.contributor, first.home
        first.status()
    other = Address("localhost", Address.parse(hub.address).port)

    def never(fingerprint: str) -> bool:
        raise AssertionError("the key is known")

    with HubClient(home, other, establish(home, other, None, never)) as client:
        assert client.pin.contributor == account
        client.authenticate()
    with enrolled_client(home, str(other), False) as client:
        assert client.pin.account == account
    assert len(with_account(home)) == 1
    assert str(address_of(home, None)) == hub.address

    found = rotation.rotate(home)
    assert [line["rotated"] for line in found["servers"]] == [True]
    with enrolled_client(home, str(other), False) as client:
        client.authenticate()  # with the key that the account has now, at either address


NOT_UTF8 = os.fsdecode(b"ann\xff")


def test_a_name_a_file_and_a_home_that_are_not_utf8_are_refused_by_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(GymError, match=r"the home folder .* is not UTF-8") as caught:
        Home.open(tmp_path / NOT_UTF8)
    assert caught.value.code is ErrorCode.USAGE
    home = Home.open(tmp_path / "home")
    for options, what in (
        (JoinOptions(name=NOT_UTF8), "the name ann"),
        (JoinOptions(data=tmp_path / NOT_UTF8), "the file"),
        (JoinOptions(model=NOT_UTF8), "the base model"),
    ):
        with pytest.raises(GymError, match=f"{what}.* is not UTF-8") as caught:
            remembered(home, options)
        assert str(caught.value).isascii()
