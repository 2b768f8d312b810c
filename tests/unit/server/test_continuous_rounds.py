"""Continuous rounds: real rounds of a hub under a simulated clock, with members of very different speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gym_server.rewards.free_riders import free_riders
from gym_server.rewards.split import split
from gym_server.rounds import merging
from gym_server.rounds.continuous import WindowUpdates, round_window
from gym_server.rounds.recipes import check_soup
from gym_server.rounds.replay import replay
from gym_server.rounds.round_store import ABORTED, COMMITTED, MERGING
from gym_server.rounds.screens import HeldOutLoss, ScreenedRound, ScreenedUpdate, Stale
from gym_server.rounds.soup_record import Judgement
from gym_server.store.tables import round_tasks, updates
from gym_server.strategy.backoff import RoundBackoff
from gym_server.strategy.lease_history import lease_history
from sqlalchemy import select

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.soup.gram import CombinationWeights
from gym_fed.soup.window import RoundWindow
from gym_fed.trust.identity.keys import SigningKey
from tests.support.paced_room import Member, PacedRoom, task_in

ROUNDS = {
    "num_rounds": 99,
    "mode": "continuous",
    "merge_every": 3,
    "min_contributors": 1,
    "deadline_seconds": 900,
    "lease_seconds": 60,
}

Open = Callable[..., PacedRoom]


@pytest.fixture
def opened(tmp_path: Path, tiny_base: Path) -> Iterator[Open]:
    rooms: list[PacedRoom] = []

    def open_room(members: list[Member], soup: dict[str, Any] | None = None, **changes: Any) -> PacedRoom:
        rounds = {**ROUNDS, **changes}
        rooms.append(PacedRoom(tmp_path / "hub", tiny_base, members, rounds=rounds, soup=soup or {}))
        return rooms[-1]

    yield open_room
    for room in rooms:
        room.close()


def entries(room: PacedRoom, kind: str) -> list[dict[str, Any]]:
    return [entry.body for entry in room.fed.ledger.entries() if entry.kind == kind]


def equal(count: int) -> tuple[CombinationWeights, torch.Tensor]:
    shares = torch.full((count,), 1 / count, dtype=torch.float64)
    return CombinationWeights.single(shares), torch.ones_like(shares)


def sent_by(room: PacedRoom, member: Member) -> list[Any]:
    with room.fed.database.reading() as tx:
        query = select(updates).where(updates.c.contributor == member.key.contributor)
        return list(tx.execute(query.order_by(updates.c.received_at)).all())


def test_a_slow_update_is_added_to_a_later_version_and_every_round_replays(opened: Open) -> None:
    slow = Member("slow", 100)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow])
    room.step()
    room.step()
    assert slow.task is not None
    first_task = slow.task.message_id
    ended = room.run(4, 600)
    assert [one.state for one in ended] == [COMMITTED] * 4
    (update, *_) = sent_by(room, slow)
    assert (slow.lost, update.message_id) == (0, first_task)
    assert (update.verdict, json.loads(update.manifest)["server_round"]) == ("merged", 1)
    assert update.server_round > 1, "it joined the round in which it arrived"
    with room.fed.database.reading() as tx:
        rows = tx.execute(select(updates.c.server_round, updates.c.contributor)).all()
        carried = select(round_tasks.c.server_round).where(round_tasks.c.message_id == first_task)
        assert list(tx.scalars(carried)) == list(range(1, update.server_round + 1))
    assert len(set(rows)) == len(rows), "at most one update of an account in a round"
    versions = entries(room, "version")
    added = [one for version in versions for one in version["window"]["updates"]]
    age = next(one["staleness"] for one in added if one["update"] == update.update_id)
    assert age == update.server_round - 1
    late = next(version for version in versions if update.update_id in version["merged"])
    assert update.update_id not in late["window"]["others"]
    after = versions[versions.index(late) + 1]
    assert update.update_id in after["window"]["others"], "it stays in the window"
    for version in versions:
        found = replay(room.fed.state, version["server_round"])
        assert found["replayed"] == found["soup"]
    room.fed.ledger.verify()


WRONG_WINDOWS: dict[str, Callable[[WindowUpdates], WindowUpdates]] = {
    "wrong version or age": lambda real: replace(real, staleness=[age + 9 for age in real.staleness]),
    "latest update of every other account": lambda real: replace(real, others=real.others[1:]),
}


@pytest.mark.parametrize("problem", WRONG_WINDOWS)
def test_a_replay_finds_a_window_that_the_hub_made_up(
    opened: Open, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def made_up(*arguments: Any) -> WindowUpdates | None:
        real = round_window(*arguments)
        return real and WRONG_WINDOWS[problem](real)

    room = opened([Member(f"fast{i}", 20) for i in range(3)], merge_every=2)
    room.run(1, 200)
    room.leave(["fast2"])
    (honest,) = room.run(1, 200)
    assert replay(room.fed.state, honest.server_round)["updates"] == 2
    monkeypatch.setattr(merging, "round_window", made_up)
    (ended,) = room.run(1, 200)
    with pytest.raises(GymError, match=problem) as caught:
        replay(room.fed.state, ended.server_round)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_an_update_signed_by_a_key_revoked_since_is_not_in_the_window_of_a_rebound_account(
    opened: Open,
) -> None:
    robbed = Member("robbed", 20)
    room = opened([*(Member(f"fast{i}", 20) for i in range(2)), robbed])
    room.run(2, 200)
    (_, merged) = sent_by(room, robbed)
    room.leave(["robbed"])
    window = round_window(room.fed.state, room.fed.config.rounds, [])
    assert window is not None
    assert merged.update_id in {one.digest for one in window.others}
    room.fed.keys.revoke_as_coordinator(robbed.key.contributor, "stolen")
    room.fed.keys.rebind(robbed.key.contributor, SigningKey.generate().public_key)
    window = round_window(room.fed.state, room.fed.config.rounds, [])
    assert window is not None
    assert len(window.others) == 2
    (ended,) = room.run(1, 1000)
    assert replay(room.fed.state, ended.server_round)["updates"] == 2, "the ledger shows why it is left out"


@pytest.mark.parametrize("declared", [True, False])
def test_the_same_work_as_an_update_that_was_merged_a_round_earlier_is_not_cheating(
    opened: Open, declared: bool
) -> None:
    twins = [Member("fast", 20, seed=77), Member("slow", 300, seed=77)]
    room = opened([*(Member(f"other{i}", 20) for i in range(2)), *twins])
    room.step()
    for member in room.members.values():
        room._works(member)
    room.fed.round_store.start_merging(1)
    (first,) = sent_by(room, twins[0])
    if declared:
        with room.fed.database.transaction() as tx:
            room._hub._commitments.commit(tx, twins[1].key.contributor, first.delta_sha256)
    else:
        room._answer(twins[1])
        twins[1].task = None
    room.seconds += 20
    assert room.strategy._finish(room.fed.round_store.require(1)).state == COMMITTED
    if declared:
        room._answer(twins[1])
        twins[1].task = None
    twins[0].seed, twins[1].seconds = None, 10_000
    room.run(1, 600)
    (second,) = sent_by(room, twins[1])
    assert second.delta_sha256 == first.delta_sha256
    assert (second.verdict, second.reason[:5]) == ("rejected", "stale"), "it was paid for already"
    found = free_riders(room.fed.state, room.fed.config, [second], second.server_round)[second.update_id]
    assert (found.cheating, found.blameless) == (False, True)


def test_the_gate_applies_an_update_at_its_share_of_a_round_merged_early(opened: Open) -> None:
    room = opened([Member(f"member{i}", 20) for i in range(4)], merge_every=3)
    room.run(1, 200)
    room.leave(["member1", "member2", "member3"])
    room.step()
    room._works(room.members["member0"])
    room.seconds += 20
    room._works(room.members["member0"])
    update = sent_by(room, room.members["member0"])[-1]
    judgement = Judgement(update.update_id, update.contributor, "merged", "")
    kept = [ScreenedUpdate(update, Path(), judgement)]
    screen = HeldOutLoss(room.fed.state, room.fed.config, room.strategy._hub_model())
    assert screen._num_weighed(kept) == 3, "K, which is below the window's 4 updates"
    assert RoundWindow(3, [0]).added(*equal(4))[0].matrix.item() == pytest.approx(1 / 3)


def test_updates_that_wait_while_the_mode_is_changed_are_rejected_without_blame(opened: Open) -> None:
    slow = Member("slow", 300)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow])
    room.run(1, 200)
    room.step()
    room._answer(slow)
    (update,) = sent_by(room, slow)
    rounds = room.fed.config.rounds.model_copy(update={"mode": "synchronous"})
    screen = Stale(room.fed.state, room.fed.config.model_copy(update={"rounds": rounds}))
    judgement = Judgement(update.update_id, update.contributor, "merged", "")
    found = screen.apply(ScreenedRound([ScreenedUpdate(update, Path(), judgement)]))
    assert [one.verdict for one in found.rejections] == ["rejected"]
    assert found.findings[update.update_id].blameless


def test_a_skipped_round_withdraws_the_tasks_that_it_carries(opened: Open) -> None:
    slow = Member("slow", 10_000)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow])
    room.run(1, 200)
    room.step()
    room.fed.steering.skip("a bad recipe")
    (ended,) = room.run(1, 200)
    assert ended.state == COMMITTED
    assert slow.lost == 1
    assert replay(room.fed.state, ended.server_round)["updates"] == 3


def test_after_a_change_to_synchronous_rounds_old_tasks_are_withdrawn(opened: Open) -> None:
    slow = Member("slow", 300)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow], merge_every=3)
    room.run(1, 200)
    path = room.fed.folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    del values["rounds"]["mode"], values["rounds"]["merge_every"]
    path.write_text(yaml.safe_dump(values))
    room.restart()
    room.step()
    room.step()
    assert slow.lost == 1
    (ended,) = room.run(1, 2000)
    assert (ended.state, len(ended.merging)) == (COMMITTED, 4)


@pytest.mark.parametrize(("pool", "lost"), [(1000, 0), (10, 1)])
def test_a_task_with_other_terms_of_pay_than_the_round_is_withdrawn(
    opened: Open, pool: int, lost: int
) -> None:
    slow = Member("slow", 10_000)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow], merge_every=3)
    room.run(1, 200)
    path = room.fed.folder / "gym-server.yaml"
    values = yaml.safe_load(path.read_text())
    values.setdefault("rewards", {})["pool"] = pool
    path.write_text(yaml.safe_dump(values))
    room.restart()
    room.run(1, 200)
    assert slow.lost == lost


def test_after_the_last_round_open_tasks_are_withdrawn(opened: Open) -> None:
    slow = Member("slow", 500)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow], num_rounds=2)
    room.run(2, 400)
    backoff = RoundBackoff(room.fed.state, room.fed.live_config, room.fed.queue, room.grid, lambda: False)
    assert not room.strategy._advance(room.grid, 2, backoff)
    room._works(slow)
    assert slow.lost == 1, "its answer would wait for a round that never opens"


def test_a_task_of_a_version_that_is_too_old_is_withdrawn_and_its_update_refused(opened: Open) -> None:
    slow, late = Member("slow", 10_000), Member("late", 10_000)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow, late], max_staleness=1)
    room.run(2, 600)
    assert room.fed.round_store.head().height == 2
    assert late.task is not None
    room._answer(late)  # two versions after its own, before the next round opens
    (refused,) = sent_by(room, late)
    assert (refused.verdict, refused.code) == ("refused", ErrorCode.STALE.value)
    assert "max_staleness" in refused.reason
    late.task = None
    room.run(1, 600)
    assert slow.lost == 1
    room.step()
    assert slow.task is not None
    assert task_in(slow.task).soups, "the new task starts from a newer version"
    assert late.task is not None


def test_malicious_updates_of_weight_zero_do_not_fill_a_round(opened: Open) -> None:
    fast = [Member(f"fast{i}", 20, direction=2.0) for i in range(3)]
    slow = [Member(f"slow{i}", 120, direction=2.0) for i in range(4)]
    lying = [Member(f"lying{i}", 20, direction=-4.0) for i in range(2)]
    soup = {"aggregator": "byzantine_robust", "num_malicious_nodes": 2}
    room = opened([*fast, *slow, *lying], soup, merge_every=5)

    def window() -> int:
        versions = entries(room, "version")
        return len(versions[-1]["window"]["updates"] + versions[-1]["window"]["others"]) if versions else 0

    while window() < 9 and room.seconds < 400:
        room.step()
    assert window() == 9, "everybody has been merged once"
    for _ in range(3):
        assert room.step() is None
    current = room.fed.round_store.current()
    assert current is not None
    rows = room.fed.round_store.admitted(current.server_round)
    assert len(rows) == 5, "as many as the round needs, of which two count for nothing"
    (ended,) = room.run(1, 600)
    assert ended.state == COMMITTED
    last = entries(room, "version")[-1]["window"]["updates"]
    assert len(last) > 5, "the round waited for a slow honest update"


def test_a_round_waits_until_the_window_can_withstand_the_malicious_clients(opened: Open) -> None:
    soup = {"aggregator": "byzantine_robust", "num_malicious_nodes": 2}
    room = opened([Member(f"fast{i}", 20) for i in range(4)], soup, merge_every=2)
    assert room.run(1, most_seconds=200) == []
    room.join([Member("fifth", 20)])
    (ended,) = room.run(1, most_seconds=200)
    assert ended.state == COMMITTED
    room.leave(["fast2", "fast3", "fifth"])
    room.run(1, most_seconds=200)
    assert room.fed.round_store.head().height > 1, "those in the window count, though they are away"


def test_a_hub_killed_while_merging_keeps_tasks_and_the_updates_that_came_meanwhile(opened: Open) -> None:
    slow, next_one = Member("slow", 300), Member("next", 300)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow, next_one])
    room.step()
    for member in room.members.values():
        room._works(member)
    assert len(room.fed.round_store.admitted(1)) == 3
    room.fed.round_store.start_merging(1)
    room._answer(next_one)
    (update,) = sent_by(room, next_one)
    assert (update.verdict, update.server_round) == ("admitted", 2)
    next_one.task = None
    room.restart()
    current = room.fed.round_store.require(1)
    assert current.state == MERGING
    assert room.strategy._finish(current).state == COMMITTED
    room.step()
    with room.fed.database.reading() as tx:
        tasks = tx.scalars(select(round_tasks.c.message_id).where(round_tasks.c.server_round == 2)).all()
    assert slow.task is not None
    assert {slow.task.message_id, update.message_id} <= set(tasks)
    room.run(1, 600)
    assert [row.verdict for row in sent_by(room, next_one)] == ["merged"]
    assert slow.lost == 0
    assert replay(room.fed.state, 2)["updates"] >= 3


def test_participation_is_divided_by_admitted_weight_and_none_goes_to_weight_zero() -> None:
    names = {"fresh": 1.0, "stale": 0.5, "rejected": 0.0}
    config = RewardsConfig(participation_ramp=False, pool=900)
    found = split(config, dict.fromkeys(names, 1.0), shares=names)
    assert found.credits == {"fresh": 600, "stale": 300, "rejected": 0}


def test_after_a_rollback_tasks_of_abandoned_versions_are_withdrawn(opened: Open) -> None:
    slow = Member("slow", 10_000)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow])
    room.run(2, 600)
    room.step()
    room.fed.steering.rollback(1)
    room.step()
    room.step()
    assert slow.lost == 1, "a task that was carried into the round is withdrawn with it"
    ended = room.run(2, 600)
    assert [one.state for one in ended] == [COMMITTED] * 2
    assert entries(room, "version")[-2]["parent"] == room.fed.round_store.version(1).digest
    last = entries(room, "version")[-1]
    assert replay(room.fed.state, last["server_round"])["soup"] == last["soup"]


def test_a_contributor_that_claims_most_examples_does_not_stop_the_hub(opened: Open) -> None:
    soup = {
        "aggregator": "geometric_median",
        "weighting": "num_examples",
        "num_examples_cap": 1000,
        "num_malicious_nodes": 1,
    }
    claiming = Member("claiming", 20, num_examples=1000)
    room = opened([*(Member(f"fast{i}", 20) for i in range(4)), claiming], soup, deadline_seconds=100)
    (ended,) = room.run(1, most_seconds=300)
    assert ended.state == ABORTED
    assert "half of the weight" in ended.reason


def test_a_round_with_too_few_updates_for_buckets_waits_for_more(opened: Open) -> None:
    soup = {"aggregator": "byzantine_robust", "pre_aggregators": ["bucketing"], "num_malicious_nodes": 1}
    members = [Member(f"member{i}", 20 if i < 3 else 60) for i in range(5)]
    room = opened(members, soup, min_contributors=5)
    (ended,) = room.run(1, most_seconds=300)
    assert (ended.state, len(ended.merging)) == (COMMITTED, 5)


def test_accounts_whose_tasks_failed_get_another_task_soon(opened: Open) -> None:
    soup = {"aggregator": "byzantine_robust", "num_malicious_nodes": 2}
    failing = [Member(f"failing{i}", 20, error="out of memory") for i in range(2)]
    room = opened([*(Member(f"fast{i}", 20) for i in range(4)), *failing], soup)
    (ended,) = room.run(1, most_seconds=300)
    assert (ended.state, "2 contributors failed" in ended.reason) == (ABORTED, True)
    for member in failing:
        member.error = ""
    (ended,) = room.run(1, most_seconds=300)
    assert ended.state == COMMITTED


def test_an_account_that_only_sends_heartbeats_delays_one_round_by_one_deadline(opened: Open) -> None:
    silent = Member("silent", float("inf"))
    room = opened([*(Member(f"fast{i}", 20) for i in range(4)), silent], merge_every=8, min_contributors=3)
    (first,) = room.run(1, most_seconds=1100)
    assert first.state == COMMITTED
    assert len(room.run(3, most_seconds=300)) == 3, "its task is older than the deadline"
    assert silent.lost == 0
    with room.fed.database.reading() as tx:
        history = lease_history(tx, 5, 60)
    assert history.by_contributor[silent.key.contributor].unanswered == 0


def test_the_one_answer_to_a_task_that_several_rounds_carried_counts_once(opened: Open) -> None:
    slow = Member("slow", 100)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), slow])
    while not (sent := sent_by(room, slow)) or sent[0].verdict == "admitted":
        room.step()
    number = sent[0].server_round
    assert number > 1
    with room.fed.database.reading() as tx:
        record = lease_history(tx, number + 1, 60).by_contributor[slow.key.contributor]
    assert (record.num_answers, len(record.seconds)) == (1, 1)


def test_without_old_versions_an_update_that_came_during_a_merge_is_merged_next(opened: Open) -> None:
    next_one = Member("next", 300)
    room = opened([*(Member(f"fast{i}", 20) for i in range(3)), next_one], max_staleness=0)
    room.step()
    for member in room.members.values():
        room._works(member)
    room.fed.round_store.start_merging(1)
    room._answer(next_one)
    next_one.task = None
    assert room.strategy._finish(room.fed.round_store.require(1)).state == COMMITTED
    (ended,) = room.run(1, 600)
    assert (ended.server_round, ended.state) == (2, COMMITTED)
    assert [row.verdict for row in sent_by(room, next_one)[:1]] == ["merged"]


def test_a_small_minimum_of_contributors_is_no_obstacle_at_start() -> None:
    soup = {"aggregator": "byzantine_robust", "num_malicious_nodes": 4}
    check_soup(ServerConfig.model_validate({"rounds": {"mode": "continuous"}, "soup": soup}))
