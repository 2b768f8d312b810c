"""A round costs the hub as many queries for many contributors as for a few, and its writers take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gym_server.federation import Federation
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.store import database as database_module
from gym_server.store.database import Database
from gym_server.store.tables import messages
from gym_server.store.unavailable import StoreUnavailable
from sqlalchemy import event, func, select

from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.paced_room import Member, PacedRoom
from tests.support.wait import SECONDS

FEW, MANY = 3, 9


@contextmanager
def listening(database: Database, name: str) -> Iterator[list[Any]]:
    """The connections of every event of the database's engine."""
    heard: list[Any] = []

    def hear(connection: Any, *_: Any) -> None:
        heard.append(connection)

    event.listen(database.engine, name, hear)
    try:
        yield heard
    finally:
        event.remove(database.engine, name, hear)


def count(database: Database, name: str, work: Callable[[], object]) -> int:
    with listening(database, name) as heard:
        work()
    return len(heard)


@pytest.fixture
def rooms(tmp_path: Path, tiny_base: Path) -> Iterator[list[PacedRoom]]:
    """Two rooms with a round that is open: of a few, and of many."""
    found = []
    for number in (FEW, MANY):
        members = [Member(f"member{i}", 1e6) for i in range(number)]
        found.append(PacedRoom(tmp_path / str(number), tiny_base, members, rounds={"deadline_seconds": 1e6}))
        found[-1].strategy._collecting(found[-1].fed.round_store.open_next().server_round)
    yield found
    for room in found:
        room.close()


def test_tasks_are_handed_out_in_as_many_transactions_to_many_contributors_as_to_a_few(
    rooms: list[PacedRoom],
) -> None:
    few, many = (count(r.fed.database, "begin", lambda r=r: r.strategy._push(1, r.grid)) for r in rooms)
    assert [len(room.fed.round_store.tasks(1)) for room in rooms] == [FEW, MANY]
    assert many == few


def test_a_look_at_a_round_takes_as_many_queries_with_many_contributors_as_with_a_few(
    rooms: list[PacedRoom],
) -> None:
    numbers = []
    for room in rooms:
        room.strategy._push(1, room.grid)
        current = room.fed.round_store.require(1)

        def look(room: PacedRoom = room, current: Any = current) -> None:
            room.strategy._pull(1, room.grid)
            assert not room.strategy._pace.is_complete(current)
            assert room.strategy._pace.round_ends(current, quorum=0) is None

        numbers.append(count(room.fed.database, "before_cursor_execute", look))
    assert numbers[0] == numbers[1]


def test_answered_tasks_of_an_ended_round_leave_the_database(tmp_path: Path, tiny_base: Path) -> None:
    room = PacedRoom(tmp_path / "hub", tiny_base, [Member(f"member{i}", 1.0) for i in range(FEW)])
    room.run(2)
    room.strategy._collecting(room.fed.round_store.open_next().server_round)
    room.strategy._push(3, room.grid)
    sizes = select(messages.c.group_id, func.length(messages.c.content)).distinct()
    with room.fed.database.reading() as tx:
        by_round = dict(tx.execute(sizes).tuples().all())
    room.close()
    assert by_round["1"] == by_round["2"] == 0 < by_round["3"]


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[LoopbackHub]:
    found = LoopbackHub(tmp_path / "hub")
    yield found
    found.close()


def test_an_upload_is_declared_and_committed_to_in_one_transaction(loopback: LoopbackHub) -> None:
    fed: Federation = loopback.fed
    hub = Hub(fed, Wakeups())
    request = pb.BeginUploadRequest(sha256="ab" * 32, size_bytes=10)
    written: list[Any] = []
    fed.database.before_commit.append(written.append)
    state = hub._begin_upload("c-ann", request)
    assert (state.offset, state.complete, len(written)) == (0, False, 1)
    assert hub._begin_upload("c-ann", request).commitment_json == state.commitment_json


def test_a_writer_waits_for_its_turn_without_asking_the_database(tmp_path: Path) -> None:
    database = Database.open("sqlite:///hub.db", tmp_path)
    inside, go_on, asked = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with database.transaction():
            inside.set()
            assert go_on.wait(SECONDS)

    def follow() -> None:
        asked.set()
        with database.transaction():
            pass

    with listening(database, "begin") as begun:
        threads = [threading.Thread(target=hold), threading.Thread(target=follow)]
        threads[0].start()
        assert inside.wait(SECONDS)
        threads[1].start()
        assert asked.wait(SECONDS)
        threads[1].join(0.3)
        assert len(begun) == 1, "the second one has not begun"
        go_on.set()
        for thread in threads:
            thread.join(SECONDS)
        assert len(begun) == 2
    database.close()


def test_a_writer_whose_turn_does_not_come_is_refused_as_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open("sqlite:///hub.db", tmp_path)
    monkeypatch.setattr(database_module, "LOCK_SECONDS", 0.01)
    refused: list[str] = []

    def follow() -> None:
        try:
            with database.transaction():
                refused.append("nothing")
        except StoreUnavailable as away:
            refused.append(away.refusal.code.value)

    with database.transaction():
        thread = threading.Thread(target=follow)
        thread.start()
        thread.join(SECONDS)
    assert refused == ["busy"]
    database.close()
