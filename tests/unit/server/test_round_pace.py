"""Nobody captures a hub by pace: real rounds under a simulated clock, with contributors that need 20 s or minutes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_server.rounds.queue import node_of
from gym_server.rounds.round_store import ABORTED, COMMITTED
from gym_server.store.tables import updates
from gym_server.strategy.lease_history import lease_history
from gym_server.strategy.pace import Pace

from gym_fed.config.hub.sections import RoundsConfig
from tests.support.paced_room import Member, PacedRoom
from tests.support.quick import quick

ROUNDS = {"num_rounds": 99, "min_contributors": 3, "deadline_seconds": 900, "lease_seconds": 60}
NOT_COMPARED = {"similarity_threshold": None, "together_threshold": None, "stale_threshold": None}
"""What an update is like has no part in pace, and takes longer than all else of a round."""

Open = Callable[..., PacedRoom]


@pytest.fixture
def opened(tmp_path: Path, tiny_base: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Open]:
    caplog.set_level(logging.INFO, "gym_server")
    rooms: list[PacedRoom] = []

    def open_room(members: list[Member], **changes: Any) -> PacedRoom:
        rounds = {**ROUNDS, **changes}
        rooms.append(PacedRoom(tmp_path / "hub", tiny_base, members, rounds=rounds, rewards=NOT_COMPARED))
        return rooms[-1]

    yield open_room
    for room in rooms:
        room.close()


def fast(count: int) -> list[Member]:
    return [Member(f"fast{i}", 20) for i in range(count)]


def slow(count: int, **details: Any) -> list[Member]:
    return [Member(f"slow{i}", 240 + 20 * i, **details) for i in range(count)]


@pytest.mark.parametrize("reports_progress", quick([True, False], True))
def test_five_slow_contributors_are_admitted_as_often_as_three_fast_ones(
    opened: Open, reports_progress: bool
) -> None:
    room = opened([*fast(3), *slow(5, reports_progress=reports_progress)])
    ended = room.run(4)
    assert [one.state for one in ended] == [COMMITTED] * 4
    counts = room.admitted()
    mean = {kind: sum(counts[f"{kind}{i}"] for i in range(n)) / n for kind, n in (("fast", 3), ("slow", 5))}
    assert mean["slow"] >= 0.9 * mean["fast"], counts
    assert mean["fast"] == 4


def test_members_that_take_more_than_half_the_deadline_are_awaited_once_that_is_known(opened: Open) -> None:
    room = opened([*fast(5), *(Member(f"slow{i}", 600) for i in range(3))])
    room.run(4)
    counts = room.admitted()
    assert min(counts[f"slow{i}"] for i in range(3)) >= 3, counts


def test_a_claim_to_be_slow_that_was_not_kept_holds_no_second_round_for_more_than_half_the_deadline(
    opened: Open,
) -> None:
    room = opened([*fast(5), Member("claims", 1e5)])
    began = room.seconds
    assert [one.state for one in room.run(4)] == [COMMITTED] * 4
    assert room.seconds - began <= 900 + 3 * 900 / 2 + 4 * 60


def test_a_slow_minority_is_given_the_time_that_its_own_heartbeats_show_and_the_log_counts_who_works(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    room = opened([*fast(5), *slow(3)])
    room.run(3)
    assert set(room.admitted().values()) == {3}
    assert "round 1: quorum reached with 5 updates of 8 tasks; 3 still at work" in caplog.text


def test_a_minority_forms_no_round_and_its_end_says_how_many_still_work_and_for_how_long(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    room = opened([*fast(3), *(Member(f"slow{i}", 1000) for i in range(5))])
    ended = room.run(2)
    assert [one.state for one in ended] == [ABORTED] * 2
    assert "3 of 5 updates at the deadline: 5 of 8 contributors still working" in ended[0].reason
    assert "the slowest for about 17 min; raise rounds.deadline_seconds (900)" in ended[0].reason
    assert "ends; contributors still at work: 5" in caplog.text


def test_a_minority_that_only_sends_heartbeats_is_awaited_three_times_and_then_no_longer(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    room = opened([*fast(5), *(Member(f"idle{i}", math.inf) for i in range(3))])
    before, lasted = 0.0, []
    for _ in range(5):
        (one,) = room.run(1)
        assert one.state == COMMITTED
        lasted.append(room.seconds - before)
        before = room.seconds
    assert min(lasted[:3]) > 200
    assert max(lasted[3:]) < 100
    assert "(3 of them left their last 3 tasks unanswered)" in caplog.text


@pytest.mark.parametrize(
    ("least", "tasks", "quorum"),
    [(3, 8, 5), (3, 4, 3), (1, 1, 1), (1, 2, 2), (1, 3, 2), (3, 0, 3), (2, 100, 51)],
)
def test_a_quorum_is_more_than_half_of_the_tasks_and_at_least_the_number(
    least: int, tasks: int, quorum: int
) -> None:
    assert RoundsConfig(min_contributors=least).quorum(tasks) == quorum


def stalling(count: int, wave: int = 1) -> list[Member]:
    return [Member(f"stalls{wave}-{i}", math.inf) for i in range(count)]


SHORT = {"deadline_seconds": 200}


@pytest.mark.parametrize("count", quick([4, 8], 4))
def test_newcomers_that_stall_as_many_as_the_honest_or_twice_as_many_stop_three_rounds_and_no_more(
    opened: Open, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    room = opened([*fast(4), *stalling(count)], **SHORT)
    ended = room.run(8)
    assert [one.state for one in ended] == [ABORTED] * 3 + [COMMITTED] * 5
    assert f"{count} of them do not count in the quorum" in caplog.text


def test_a_second_wave_of_stalling_newcomers_stops_no_round(opened: Open) -> None:
    room = opened([*fast(4), *stalling(4)], **SHORT)
    assert [one.state for one in room.run(4)] == [ABORTED] * 3 + [COMMITTED]
    room.join(stalling(4, wave=2))
    assert [one.state for one in room.run(3)] == [COMMITTED] * 3


@pytest.mark.slow
def test_members_that_stall_after_answering_stop_three_rounds_and_count_again_only_after_more_answers(
    opened: Open,
) -> None:
    room = opened([*fast(4), *(Member(f"turns{i}", 20) for i in range(4))], **SHORT)
    assert [one.state for one in room.run(2)] == [COMMITTED] * 2
    for i in range(4):
        room.members[f"turns{i}"].seconds = math.inf
    assert [one.state for one in room.run(3)] == [ABORTED] * 3
    for i in range(4):
        room.members[f"turns{i}"].seconds = 20  # one answer does not buy three more rounds
    assert [one.state for one in room.run(1)] == [COMMITTED]
    for i in range(4):
        room.members[f"turns{i}"].seconds = math.inf
    assert [one.state for one in room.run(3)] == [COMMITTED] * 3


@pytest.mark.slow
def test_members_that_answer_three_rounds_and_stall_in_the_fourth_stop_fewer_each_time(opened: Open) -> None:
    room = opened([*fast(4), *(Member(f"turns{i}", 20) for i in range(4))], **SHORT)
    states = []
    for _ in range(4):
        for seconds, count in ((20.0, 3), (math.inf, 1)):
            for i in range(4):
                room.members[f"turns{i}"].seconds = seconds
            states += [one.state for one in room.run(count)]
    assert states == [COMMITTED, COMMITTED, COMMITTED, ABORTED] * 3 + [COMMITTED] * 4


@pytest.mark.parametrize(("honest", "count"), quick([(4, 4), (8, 8), (8, 16)], (4, 4)))
def test_waves_of_new_accounts_that_answer_one_round_in_four_stop_three_rounds(
    opened: Open, honest: int, count: int
) -> None:
    room = opened(fast(honest), **SHORT)
    states = []
    for wave in range(3):
        accounts = [Member(f"wave{wave}-{i}", 20) for i in range(count)]
        room.join(accounts)
        states += [one.state for one in room.run(1)]
        for account in accounts:
            account.seconds = math.inf
        states += [one.state for one in room.run(3)]
        room.leave(account.name for account in accounts)
    assert states == [COMMITTED, *[ABORTED] * 3, *[COMMITTED] * 8]


def test_an_account_whose_answers_were_rejected_is_not_established(opened: Open) -> None:
    room = opened(fast(4), **SHORT)
    room.run(3)
    contributor = room.members["fast0"].key.contributor
    with room.fed.database.transaction() as tx:
        before = lease_history(tx, 4, 60).by_contributor
        tx.execute(updates.update().where(updates.c.contributor == contributor).values(verdict="rejected"))
        after = lease_history(tx, 4, 60).by_contributor
    assert before[contributor].is_established
    assert [name for name, record in after.items() if not record.is_established] == [contributor]


def test_members_that_are_late_for_merged_rounds_still_count_so_that_the_fast_do_not_remove_them(
    opened: Open,
) -> None:
    room = opened(
        [*fast(3), *(Member(f"slow{i}", 80 + 20 * i) for i in range(5))],
        **SHORT,
        grace_min_seconds=0,
        grace_max_seconds=1,
    )
    ended = room.run(6)
    assert [one.state for one in ended] == [COMMITTED] * 6
    assert min(len(one.merging) for one in ended) >= 5


def test_rounds_that_the_coordinator_ends_count_against_nobody(opened: Open) -> None:
    room = opened([*fast(3), *(Member(f"slow{i}", 100) for i in range(5))], **SHORT)
    for _ in range(4):
        room.step()
        room.step()
        room.fed.steering.skip("a trial")
        current = room.fed.round_store.current()
        assert current is not None
        room.strategy._finish(current)
    (ended,) = room.run(1)
    assert ended.state == COMMITTED
    assert len(ended.merging) == 8


def test_an_account_that_enrols_new_installations_keeps_the_tasks_that_it_left_unanswered(
    opened: Open,
) -> None:
    room = opened([*fast(4), *stalling(4)], **SHORT)
    room.run(3)
    fed = room.fed
    stalled = room.members["stalls1-0"]
    fed.accounts.connected(stalled.node, fed.clock.now() - 1)
    with fed.database.transaction() as tx:
        new = node_of(tx, stalled.key.contributor, "another-instance", 1, fed.clock.now())
        history = lease_history(tx, 4, 60)
    assert new != stalled.node
    assert history.by_contributor[stalled.key.contributor].blocked == {1, 2, 3}


def test_a_hub_of_two_hundred_secure_rounds_keeps_the_figures_of_one_stage(opened: Open) -> None:
    fed = opened(fast(1)).fed
    pace = Pace(fed.state, fed.live_config, fed.lease_histories)
    for server_round in range(1, 201):
        assert pace._of_stage(server_round, "share") == []
    kept = [value for value in vars(pace).values() if isinstance(value, dict | list | tuple)]
    assert sum(len(value) for value in kept) < 10
