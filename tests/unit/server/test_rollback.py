"""A coordinator goes back to an earlier version: the next one follows from it, and ledger, tables and replay agree."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gym_server.federation import Federation
from gym_server.rounds.hub_model import HubModel, write_version
from gym_server.rounds.replay import replay
from gym_server.rounds.steering import is_coordinators
from gym_server.store.tables import versions
from gym_server.strategy.tasks import new_task
from sqlalchemy import update

from gym_fed.config.hub.task import check_lineage, next_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.lineage import LineageCheck
from gym_fed.trust.ledger.royalties import PaidVersion, attribute
from tests.support.warm import run
from tests.unit.server.test_server_state import (
    hub,  # noqa: F401
    merge_next,
    model,  # noqa: F401
    version_entries,
)

pytestmark = pytest.mark.usefixtures("updates_without_admission")


def weights(of: HubModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(of.model).items()}


def test_the_next_version_follows_from_the_one_gone_back_to_bit_for_bit(
    hub: Federation,  # noqa: F811
    model: HubModel,  # noqa: F811
    tmp_path: Path,
) -> None:
    merge_next(hub, model)
    model.follow(hub.round_store.soups())
    first = weights(model)
    merge_next(hub, model)
    merge_next(hub, model)
    found = hub.steering.rollback(1, "the loss rose")
    assert (found.before.height, found.to.height) == (3, 1)
    head = hub.round_store.head()
    assert (head.height, hub.round_store.num_committed(), hub.round_store.newest_height()) == (1, 1, 3)
    task = new_task(hub.state, hub.config, hub.max_update_bytes, 9)
    check_lineage(task)
    assert task.version_digest == head.digest
    model.follow(hub.round_store.soups())
    now = weights(model)
    assert all(torch.equal(now[name], first[name]) for name in first), "the weights of version 1, to the bit"

    number = merge_next(hub, model)
    made = hub.round_store.head()
    assert (made.height, made.parent) == (4, 1)
    assert [soup.server_round for soup in hub.round_store.soups()] == [1, number]
    assert version_entries(hub)[-1]["parent"] == head.digest
    assert hub.ledger.verify()["versions"] == 4
    for server_round in (1, 2, 3, number):  # with momentum and residual as the parent left them
        assert replay(hub.state, server_round)["updates"] == 1
    assert (
        write_version(hub.state, hub.config, tmp_path / "abandoned", 3)["digest"]
        == hub.round_store.version(3).digest
    )
    (entry,) = [entry.body for entry in hub.ledger.entries() if entry.kind == "rolled-back"]
    assert (entry["from_height"], entry["to_height"], entry["reason"]) == (3, 1, "the loss rose")

    hub.steering.rollback(3)
    hub.steering.rollback(0)
    assert hub.round_store.head().digest == hub.base.digest
    merge_next(hub, model)
    assert hub.round_store.head().parent == 0
    assert hub.ledger.verify()["versions"] == 5


def test_a_round_under_way_ends_and_a_version_that_is_not_there_is_refused(hub: Federation) -> None:  # noqa: F811
    number = hub.round_store.open_next().server_round
    for height, code in ((0, ErrorCode.USAGE), (7, ErrorCode.NOT_FOUND), (10**20, ErrorCode.NOT_FOUND)):
        with pytest.raises(GymError) as refused:
            hub.steering.rollback(height)
        assert refused.value.code is code
    assert hub.round_store.require(number).state == "open", "nothing was decided"


def test_a_round_under_way_is_aborted_with_the_reason(hub: Federation, model: HubModel) -> None:  # noqa: F811
    merge_next(hub, model)
    number = hub.round_store.open_next().server_round
    assert hub.steering.rollback(0, "afresh").aborted_round == number
    ended = hub.round_store.require(number)
    assert ended.reason == "the coordinator went back to version 0: afresh"
    assert is_coordinators(ended.reason)


def test_a_parent_that_the_ledger_does_not_say_is_found(hub: Federation, model: HubModel) -> None:  # noqa: F811
    for _ in range(3):
        merge_next(hub, model)
    with hub.database.transaction() as tx:
        tx.execute(update(versions).where(versions.c.height == 3).values(parent=1))
    with pytest.raises(GymError, match="its parent is 1, which differs from the ledger"):
        hub.ledger.verify()


@pytest.mark.parametrize(("line", "height"), [("steering", 2), ("after-steering", 1)])
def test_a_killed_rollback_has_happened_or_not(
    hub: Federation,  # noqa: F811
    model: HubModel,  # noqa: F811
    line: str,
    height: int,
) -> None:
    merge_next(hub, model)
    merge_next(hub, model)
    number = hub.round_store.open_next().server_round
    killed = run(
        ["gym-server", "rollback", "1", "--dir", str(hub.folder)],
        env={**os.environ, "GYM_FAILPOINTS": line},
    )
    assert killed.returncode == -9
    with Federation.open(hub.folder) as again:
        assert again.round_store.head().height == height
        assert again.round_store.require(number).state == ("open" if height == 2 else "aborted")
        assert again.ledger.verify()["versions"] == 2
        assert replay(again.state, 2)["version"] == 2


# ---- what anybody checks ----


BASE = "sha256:base"


def chain(*bodies: tuple[str, dict[str, Any]]) -> LineageCheck:
    found = LineageCheck()
    for number, (kind, body) in enumerate(bodies, 1):
        found.add(Entry(number, kind, json.dumps(body), "", ""), body)
    return found


def made(height: int, parent: str) -> tuple[str, dict[str, Any]]:
    soup, digest = f"soup{height}", next_digest(parent, f"soup{height}", height)
    return "version", {
        "height": height,
        "parent": parent,
        "soup": soup,
        "server_round": height,
        "digest": digest,
    }


ONE = made(1, BASE)
TWO = made(2, ONE[1]["digest"])


def back(version: tuple[str, dict[str, Any]], **changes: Any) -> tuple[str, dict[str, Any]]:
    body = {
        "from": TWO[1]["digest"],
        "to": version[1]["digest"],
        "to_height": version[1]["height"],
        "newest_height": 2,
    }
    return "rolled-back", {**body, **changes}


def test_the_check_of_a_ledger_follows_a_rollback() -> None:
    three = made(3, ONE[1]["digest"])
    assert chain(ONE, TWO, back(ONE), three).current == three[1]["digest"]
    to_base = back(ONE, to=BASE, to_height=0)
    assert chain(ONE, TWO, to_base, made(3, BASE)).current == made(3, BASE)[1]["digest"]


@pytest.mark.parametrize(
    "bodies",
    [
        [ONE, TWO, made(3, ONE[1]["digest"])],
        [ONE, TWO, back(ONE), made(3, TWO[1]["digest"])],
        [ONE, TWO, back(ONE), made(2, ONE[1]["digest"])],
        [ONE, TWO, back(ONE, **{"from": ONE[1]["digest"]})],
        [ONE, TWO, back(ONE, newest_height=1)],
        [ONE, TWO, back(ONE, to_height=2)],
        [ONE, TWO, back(ONE, to="sha256:other")],
        [ONE, ("version", {**TWO[1], "soup": "another"})],
        [back(ONE)],
        [ONE, ("rolled-back", {})],
    ],
)
def test_a_ledger_whose_versions_do_not_follow_is_found(bodies: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(GymError) as found:
        chain(*bodies)
    assert found.value.code is ErrorCode.STATE_CORRUPT


def test_royalties_go_to_those_who_lead_to_the_version() -> None:
    paid = [
        PaidVersion(1, "one", 1, None, {"ann": 1}, BASE),
        PaidVersion(2, "two", 2, None, {"bob": 1}, "one"),
        PaidVersion(3, "three", 3, None, {"cat": 1}, "one"),
    ]
    shares = {share.height: share.shares for share in attribute(paid, 3, 100)}
    assert shares == {1: {"ann": 50}, 3: {"cat": 50}}
