"""The hub's clock: what a step of the machine's clock, a crash and a restart do to the hub's time."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_client.hub.clock import HubTime
from gym_server.clock import HubClock
from gym_server.clock_watch import MAX_CLOCKS, ClockWatch, ContributorClocks
from gym_server.store.database import Database
from gym_server.store.tables import nodes, rounds

from gym_fed.core import portable
from gym_fed.core.portable import steady_seconds
from gym_fed.trust.wire.limits import KEEPALIVE_SECONDS
from tests.support.wait import SECONDS

HOUR = 3600.0


class Machine:
    """A machine's three clocks."""

    def __init__(self) -> None:
        self.wall, self.steady, self.awake = 1.8e9, 50.0, 40.0

    def passes(self, seconds: float) -> None:
        self.awake += seconds
        self.sleeps(seconds)

    def sleeps(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def clock(self, database: Database) -> HubClock:
        return HubClock(database, lambda: self.wall, lambda: self.steady, lambda: self.awake)


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


def test_the_time_is_read_while_the_clock_waits_to_write_the_database(
    database: Database, machine: Machine
) -> None:
    clock = machine.clock(database)
    clock.start()
    machine.wall += HOUR
    times: list[float] = []
    waiting = threading.Thread(target=clock.keep, daemon=True)
    reading = threading.Thread(target=lambda: times.append(clock.now()), daemon=True)
    with database.transaction():
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
        machine.sleeps(8 * HOUR)
        reading.start()
        reading.join(SECONDS)
        assert len(times) == 1
    waiting.join(SECONDS)
    assert not waiting.is_alive()


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


def test_a_machine_that_sleeps_in_mid_round_costs_no_lease_and_the_hub_catches_up_after_the_round(
    database: Database, machine: Machine
) -> None:
    open_round(database, machine.wall)
    clock = machine.clock(database)
    clock.start()
    began = clock.now()
    machine.passes(60)
    machine.sleeps(8 * HOUR)
    assert clock.now() == pytest.approx(began + 60)
    assert clock.keep() == 0.0, "nobody set the machine's clock"
    assert machine.clock(database).now() == pytest.approx(began + 60), "of a command in another process"
    machine.passes(5)
    machine.wall += 300
    assert clock.keep() == pytest.approx(300)
    clock.catch_up()
    assert clock.now() == pytest.approx(began + 65 + 8 * HOUR)
    assert clock.slept == pytest.approx(8 * HOUR)


def test_a_machine_that_sleeps_between_rounds_does_not_put_the_hub_behind_and_the_log_says_how_long(
    database: Database, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    fed = watched(database, machine)
    watch = ClockWatch(fed.clock, fed.contributor_clocks)
    for _ in range(2):
        machine.sleeps(8 * HOUR)
        watch.check()
        assert fed.clock.now() == pytest.approx(machine.wall)
    assert caplog.text.count("this machine slept for 8 h") == 2
    assert "was set" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="the clock's name is Linux's")
def test_the_clocks_of_hub_and_contributor_count_sleep(database: Database) -> None:
    assert HubClock(database).steady is steady_seconds
    assert inspect.signature(HubTime).parameters["steady"].default is steady_seconds
    assert steady_seconds() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=1)


@pytest.mark.parametrize(("platform", "expected"), [("darwin", "CLOCK_MONOTONIC"), ("win32", None)])
def test_the_clock_that_counts_sleep_is_chosen_by_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, expected: str | None
) -> None:
    monkeypatch.setattr(portable.sys, "platform", platform)
    if expected is None:
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    number = portable._steady_clock.__wrapped__()
    assert number == (None if expected is None else getattr(time, expected))


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
    watch = ClockWatch(fed.clock, fed.contributor_clocks)
    for number, name in enumerate("abc", start=1):
        fed.contributor_clocks.note(name, right, fed.clock.now())
        watch.check()
        assert (f"6 h 0 min {side} the median of 3 contributors' clocks" in caplog.text) == (number == 3)
    watch.check()
    assert caplog.text.count("probably wrong") == 1


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
