"""The hub's clock: what a step of the machine's clock, a crash and a restart do to the hub's time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.accounts.contributor_clocks import MAX_CLOCKS, ContributorClocks
from gym_server.clock import HubClock
from gym_server.clock_watch import ClockWatch
from gym_server.store.database import Database
from gym_server.store.tables import nodes, rounds

from gym_fed.wire.limits import KEEPALIVE_SECONDS

HOUR = 3600.0


class Machine:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.wall, self.steady = 1.8e9, 50.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def clock(self, database: Database) -> HubClock:
        return HubClock(database, lambda: self.wall, lambda: self.steady)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = Database.open("sqlite:///hub.db", tmp_path)
    yield found
    found.close()


def open_round(database: Database, at: float, state: str = "collecting") -> None:
    with database.transaction() as tx:
        tx.execute(rounds.insert().values(server_round=1, state=state, base_height=0, opened_at=at))


def connect(database: Database, until: float) -> None:
    with database.transaction() as tx:
        tx.execute(nodes.insert().values(contributor="c", instance="i", connected_until=until))


@pytest.mark.parametrize("step", [6 * HOUR, -6 * HOUR, 40 * 365 * 24 * HOUR])
def test_the_hubs_time_goes_on_when_the_machines_clock_is_set_and_other_processes_see_the_same(
    database: Database, machine: Machine, step: float
) -> None:
    clock = machine.clock(database)
    clock.start()
    began = clock.now()
    machine.passes(60)
    machine.wall += step
    assert clock.now() == pytest.approx(began + 60)
    assert clock.keep() == pytest.approx(step)
    assert clock.keep() == 0.0
    assert machine.clock(database).now() == pytest.approx(clock.now()), "of a command in another process"


def test_a_hub_that_begins_again_in_mid_round_continues_from_its_last_trace_and_catches_up_after_the_round(
    database: Database, machine: Machine
) -> None:
    last = machine.wall
    open_round(database, last - 100)
    connect(database, last + KEEPALIVE_SECONDS)
    machine.passes(3 * HOUR)
    clock = machine.clock(database)
    clock.start()
    assert clock.now() == pytest.approx(last)
    machine.passes(10)
    clock.catch_up()
    assert clock.now() == pytest.approx(machine.wall)
    clock.catch_up()
    assert clock.now() == pytest.approx(machine.wall), "once"


def test_without_a_round_under_way_a_hub_begins_at_the_machines_time_and_nobody_counts_as_connected(
    database: Database, machine: Machine
) -> None:
    open_round(database, machine.wall + 6 * HOUR, "committed")  # the clock was ahead then
    connect(database, machine.wall + 6 * HOUR)
    clock = machine.clock(database)
    clock.start()
    assert clock.now() == pytest.approx(machine.wall)
    with database.reading() as tx:
        assert tx.scalar(nodes.select().with_only_columns(nodes.c.connected_until)) <= clock.now()


def watched(database: Database, machine: Machine) -> Any:
    fed = SimpleNamespace(clock=machine.clock(database), contributor_clocks=ContributorClocks())
    fed.clock.start()
    return fed


@pytest.mark.parametrize(("step", "side"), [(6 * HOUR, "ahead of"), (-6 * HOUR, "behind")])
def test_a_hub_whose_clock_differs_from_three_contributors_is_named_as_the_wrong_one_once(
    database: Database, machine: Machine, caplog: pytest.LogCaptureFixture, step: float, side: str
) -> None:
    caplog.set_level(logging.WARNING, "gym_server")
    right = machine.wall
    machine.wall += step
    fed = watched(database, machine)
    watch = ClockWatch(fed)
    for number, name in enumerate("abc", start=1):
        fed.contributor_clocks.note(name, right, fed.clock.now())
        watch.look()
        assert (f"6 h 0 min {side} those of 3 contributors" in caplog.text) == (number == 3)
    watch.look()
    assert caplog.text.count("the wrong one") == 1


def test_one_account_has_one_clock_and_figures_that_are_no_time_count_for_nothing() -> None:
    clocks = ContributorClocks()
    assert clocks.median() == (0.0, 0)
    now = time.time()
    for seconds in (0.0, float("nan"), float("inf")):
        clocks.note("c", seconds, now)
    assert clocks.median() == (0.0, 0)
    for _ in range(9):
        clocks.note("c", now + 500, now)
    clocks.note("d", now, now)
    clocks.note("e", now, now)
    assert clocks.median() == (0.0, 3)
    for number in range(2 * MAX_CLOCKS):
        clocks.note(str(number), now, now)
    assert clocks.median()[1] == MAX_CLOCKS
