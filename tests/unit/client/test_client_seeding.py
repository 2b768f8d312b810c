"""Seeding as the contributor sees it: settings, terms, totals, and soups of a task that come from another member."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest
from gym_client.agent.agreement import Terms
from gym_client.base.offer import BaseOffer
from gym_client.cli.announced import announced_seeding
from gym_client.cli.terminal import traffic_line
from gym_client.identity.home import Home
from gym_client.seeding.policy import SeedingPolicy
from gym_client.seeding.store import SeedingTotals, SeedStore, remove_leftovers

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.seeding import SeedingConfig
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


def test_the_settings_are_off_by_default_and_refuse_an_address_that_is_none(home: Home) -> None:
    from gym_client.agent.policy import Policy

    assert Policy.load(home.policy_path).seeding is None
    home.policy_path.write_text("seeding: {listen: here}\n")
    with pytest.raises(GymError) as caught:
        Policy.load(home.policy_path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    home.policy_path.write_text("seeding: {listen: '0.0.0.0:9445', max_bytes_per_second: 200000}\n")
    policy = Policy.load(home.policy_path).seeding
    assert policy is not None
    assert policy.slots() == 1  # at that rate two downloads would be too slow
    fetches, serves = policy.in_words()
    assert "can learn this machine's address" in fetches
    assert "0.0.0.0:9445" in serves
    assert "200.0 kB/s" in serves
    assert "keeping 1.07 GB of soups" in serves
    assert "100.0 kB/s" in policy.in_words(100_000)[1]
    assert len(SeedingPolicy().in_words()) == 1
    assert [policy.slots(limit) for limit in (None, 1 << 20, 100_000, 65_535)] == [1, 1, 1, 0]
    assert "serves nothing" in policy.in_words(65_535)[1]


def test_seeding_is_a_term_that_needs_a_new_consent(home: Home) -> None:
    def terms(seeding: bool) -> Terms:
        recipe, codec = TrainingRecipe(), CodecPolicy()
        return Terms.of("s" + "0" * 16, "base", recipe, codec, "", "rows", seeding=seeding)

    assert terms(False).changes(terms(True)) == ["seeding: null -> true"]
    assert terms(False).name != terms(True).name


@pytest.mark.parametrize("allowed", [True, False])
def test_a_hub_announces_whether_it_allows_seeding(tmp_path: Path, allowed: bool) -> None:
    hub = LoopbackHub(tmp_path / "hub", seeding={"min_bytes": 5} if allowed else None)
    client = hub.client(tmp_path / "me")
    found = announced_seeding(client.status())
    assert (found.min_bytes if found else None) == (5 if allowed else None)
    client.close()
    hub.close()


def test_terms_of_seeding_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(GymError) as caught:
        announced_seeding(pb.StatusReply(recipe_json='{"seeding": {"min_bytes": "many"}}'))
    assert caught.value.code is ErrorCode.POLICY_REFUSED


def test_totals_outlive_the_process_and_the_days_bytes_end_with_the_day(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = SeedingTotals(home, 1000)
    totals.receive(5)
    day = totals.reserve(950)
    assert day
    assert not totals.reserve(51)  # though none of it is sent yet
    totals.serve(900)
    totals.release(50, day)
    assert totals.may_serve(100)
    assert not totals.may_serve(101)
    totals.save()
    again = SeedingTotals(home, 1000)
    assert not again.may_serve(101)
    again._bytes.day = (datetime.date.today() - datetime.timedelta(days=3)).isoformat()
    assert again.reserve(1000)
    again.release(500, "2020-01-01")
    assert not again.may_serve(1)
    again.release(1000, again._bytes.day)
    assert again.may_serve(1000)
    assert (again.now.received, again.now.served, again.now.served_on_day) == (5, 900, 0)


@pytest.mark.parametrize("text", ["[]", "{", '{"received": -1}', '{"sent": 1}', '{"served": "1"}'])
def test_damaged_totals_are_named(home: Home, text: str) -> None:
    (home.folder / "seeding.json").write_text(text)
    with pytest.raises(GymError, match=r"seeding\.json") as caught:
        SeedingTotals(home)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_status_shows_what_was_exchanged_with_others() -> None:
    account = {"bytes_down": 1, "bytes_up": 1, "round_download_bytes": 1, "verdicts": []}
    none = {"received": 0, "served": 0, "served_on_day": 0}
    assert "seeding" not in traffic_line({**account, "seeding": none})
    some = {"received": 2_000_000, "served": 3_000_000, "served_on_day": 1_000_000}
    assert traffic_line({**account, "seeding": some}).endswith(
        "seeding: 2.0 MB from other contributors, 3.0 MB to them (1.0 MB today)"
    )


def test_the_oldest_soups_go_first_and_a_file_that_changed_its_size_is_not_served(tmp_path: Path) -> None:
    store = SeedStore(tmp_path / "seeds", SeedingPolicy(max_disk_bytes=250))
    names = [letter * 64 for letter in "abc"]
    for name in names:
        path = tmp_path / name
        path.write_bytes(b"x" * 100)
        assert store.add(path, name, "soups")
        assert not store.add(path, name, "soups")
        path.unlink()
    assert store.names() == names[1:]
    assert store.find(names[0]) is None
    kept = store.find(names[1])
    assert kept is not None
    assert kept.path.read_bytes() == b"x" * 100
    kept.path.write_bytes(b"longer" * 100)
    assert store.find(names[1]) is None
    large = tmp_path / "large"
    large.write_bytes(b"x" * 251)
    assert not store.add(large, "d" * 64, "soups")
    store.close()
    assert not (tmp_path / "seeds").exists()


def test_an_object_that_cannot_be_linked_or_copied_is_not_served_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SeedStore(tmp_path / "seeds", SeedingPolicy())
    assert not store.add(tmp_path / "missing", "a" * 64, "soups")
    (tmp_path / "soup").write_bytes(b"x" * 100)

    def fails(*_: object) -> None:
        raise OSError(1, "not permitted")

    def is_full(source: Path, target: Path) -> None:
        target.write_bytes(b"x" * 10)
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("gym_client.seeding.store.os.link", fails)
    monkeypatch.setattr("gym_client.seeding.store.shutil.copyfile", is_full)
    assert not store.add(tmp_path / "soup", "b" * 64, "soups")
    assert list((tmp_path / "seeds").iterdir()) == []


def test_links_of_a_killed_run_are_removed_without_the_section_too(home: Home) -> None:
    leftover = home.folder / "seeds" / ("a" * 64)
    leftover.parent.mkdir()
    leftover.write_bytes(b"x")
    unverified = home.objects / f"{'b' * 64}.seed"
    unverified.write_bytes(b"x")
    remove_leftovers(home)
    assert not leftover.parent.exists()
    assert not unverified.exists()


def test_the_consent_to_a_base_says_what_seeding_does_from_then_on() -> None:
    offer = BaseOffer("base", "sha256:" + "0" * 64, 10, 1, "0" * 64, "mit", "", "")
    policy = SeedingPolicy(listen="0.0.0.0:9445")
    lines = replace(offer, seeding=tuple(policy.in_words())).lines()
    assert any("serves the base and soups at 0.0.0.0:9445" in line for line in lines)
    assert replace(offer, seeding=("x",)).fixed_terms() != offer.fixed_terms()


def test_a_wait_is_bounded_by_the_size_and_by_the_config() -> None:
    assert SeedingConfig().idle_seconds(20 << 20) == 90
    assert SeedingConfig().wait_seconds(20 << 20) == 360
    assert SeedingConfig().wait_seconds(20 << 30) == 3600
    assert SeedingConfig(max_wait_seconds=0).wait_seconds(20 << 30) == 0
