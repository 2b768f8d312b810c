"""Continuous rounds: real rounds of a hub under a simulated clock, with members of very different speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.rewards.split import split
from gym_server.rounds.replay import replay
from gym_server.rounds.round_store import COMMITTED, MERGING
from gym_server.store.tables import round_tasks, updates
from sqlalchemy import select

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.core.errors import ErrorCode
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
