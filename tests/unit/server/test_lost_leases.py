"""Leases that end without an answer: whose messages are looked at, and how often a task is handed out again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from gym_server.rounds.queue import node_of
from gym_server.store.tables import messages, nodes
from sqlalchemy import select

from tests.support.paced_room import STEP_SECONDS, Member, PacedRoom

LEASE, DEADLINE = 60, 1800


@pytest.fixture
def room(tmp_path: Path, tiny_base: Path) -> Iterator[PacedRoom]:
    rounds = {"num_rounds": 9, "min_contributors": 1, "deadline_seconds": DEADLINE, "lease_seconds": LEASE}
    found = PacedRoom(tmp_path / "hub", tiny_base, [Member("ann", 20), Member("ben", 20)], rounds=rounds)
    yield found
    found.close()


def states(room: PacedRoom, name: str) -> list[str]:
    query = select(messages.c.state).where(messages.c.node_id == room.members[name].node)
    with room.fed.database.reading() as tx:
        return list(tx.scalars(query.order_by(messages.c.created_at)))


def test_a_node_that_asks_for_its_task_expires_its_own_lease_and_the_sweep_those_of_all(
    room: PacedRoom,
) -> None:
    room.strategy._collecting(room.fed.round_store.open_next().server_round)
    room.strategy._push(1, room.grid)
    for name in ("ann", "ben"):
        assert room.fed.queue.lease(room.members[name].node) is not None
    room.seconds += LEASE + 1
    assert room.fed.queue.lease(room.members["ann"].node) is None
    assert (states(room, "ann"), states(room, "ben")) == (["lost"], ["leased"])
    room.fed.queue.expire()
    assert states(room, "ben") == ["lost"]


def test_a_task_whose_lease_is_lost_again_and_again_is_handed_out_at_doubling_intervals(
    room: PacedRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a hub that is too busy for heartbeats: its contributors are connected, and every lease ends."""
    answered = room._works

    def only_ben_is_heard(member: Member) -> None:
        if member.name == "ben":
            answered(member)
        elif room.fed.queue.held(member.node) is None:
            room.fed.queue.lease(member.node)

    room.members["ben"].seconds = DEADLINE + 100
    monkeypatch.setattr(room, "_works", only_ben_is_heard)
    handed_out: list[float] = []
    while room.seconds < DEADLINE:
        before = len(states(room, "ann"))
        room.step()
        if len(states(room, "ann")) > before:
            handed_out.append(room.seconds)
    pauses = [after - before for before, after in pairwise(handed_out)]
    assert 4 <= len(handed_out) <= 5, handed_out
    assert pauses[0] <= LEASE + 2 * STEP_SECONDS, "after one loss it is handed out at once"
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 4 * pauses[0]


@pytest.mark.parametrize("most", [8, 1], ids=["several installations", "each replaces the last"])
def test_an_account_waits_before_it_gets_a_lost_task_again_whichever_of_its_nodes_lost_it(
    room: PacedRoom, most: int
) -> None:
    """Each new installation has a node id of its own, and loses the task that it is handed."""
    queue, accounts = room.fed.queue, room.fed.accounts
    account = accounts.get_or_create(room.members["ann"].key.public_key)
    accounts.connected(room.members["ann"].node, 0.0)
    room.members["ben"].seconds = DEADLINE + 100
    room.strategy._collecting(room.fed.round_store.open_next().server_round)
    handed_out = 0
    for number in range(8):
        with room.fed.database.transaction() as tx:
            node = node_of(tx, account, f"installation{number}", most, room.fed.clock.now())
        accounts.connected(node, room.fed.clock.now() + LEASE)
        room.strategy._push(1, room.grid)
        handed_out += queue.lease(node) is not None
        accounts.connected(node, 0.0)
        room.seconds += LEASE + 1
        room.strategy._pull(1, room.grid)
    with room.fed.database.reading() as tx:
        mine = tx.scalars(select(nodes.c.node_id).where(nodes.c.contributor == account)).all()
    assert len(mine) == most
    assert handed_out == 4, "at once, and after one, three and seven leases more"
