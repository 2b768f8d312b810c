"""A contributor that declines changed terms is given the round's task again, when it comes back with a consent."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.agent.task_objects import to_refusal
from gym_client.hub.transport import HubClient
from gym_server.strategy import DeltaSoup
from gym_server.strategy.grid import HubGrid
from gym_server.strategy.tasks import new_task

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub


class Collecting:
    """A hub whose round 1 collects, with one contributor, ada, that is connected."""

    def __init__(self, folder: Path) -> None:
        self.hub = LoopbackHub(folder / "hub", rounds={"min_contributors": 1})
        fed = self.hub.fed
        self.client: HubClient = self.hub.client(folder / "ada")
        number = fed.round_store.open_next().server_round
        fed.round_store.start_collecting(
            number, new_task(fed.state, fed.config, fed.max_update_bytes, number)
        )
        self.grid, self.strategy = (
            HubGrid(fed.state, fed.live_config, fed.queue, fed.max_update_bytes),
            DeltaSoup(fed),
        )
        self.node = self.client.node_id
        fed.accounts.connected(self.node, time.time() + 600)

    def give(self) -> str | None:
        """What the strategy does between two polls; the task that the contributor holds then."""
        fed = self.hub.fed
        self.strategy._push(1, self.grid)
        held = fed.queue.lease(self.node) or fed.queue.held(self.node)
        return None if held is None else held.message_id

    def decline(self, message_id: str, code: ErrorCode = ErrorCode.TERMS_CHANGED) -> None:
        """As a client does; then what the strategy hears of it."""
        self.client.call("Submit", to_refusal(message_id, GymError(code, "recipe.max_steps: 3 -> 4")))
        self.strategy._pull(1, self.grid)

    def outcomes(self) -> list[str]:
        return [outcome for _, outcome in self.hub.fed.round_store.tasks(1).values()]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Collecting]:
    found = Collecting(tmp_path)
    yield found
    found.client.close()
    found.hub.close()


def test_a_declined_task_is_given_again_in_the_same_round(
    scene: Collecting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gym_server")
    first = scene.give()
    assert first is not None
    scene.decline(first)
    assert scene.outcomes() == ["lost"], "it is not one of those that failed"
    second = scene.give()
    assert second not in (None, first)
    assert scene.outcomes() == [""], "the round waits for it"
    assert "round 1: ada returned the task: terms-changed: recipe.max_steps: 3 -> 4" in caplog.text
    assert "node " not in caplog.text


def test_who_declines_again_and_again_is_not_asked_a_fifth_time(scene: Collecting) -> None:
    for _ in range(4):
        task = scene.give()
        assert task is not None
        scene.decline(task)
    assert scene.outcomes() == ["failed"]
    assert scene.give() is None


def test_a_task_that_failed_is_given_once_a_round(scene: Collecting) -> None:
    task = scene.give()
    assert task is not None
    scene.decline(task, ErrorCode.POLICY_REFUSED)
    assert scene.outcomes() == ["failed"]
    assert scene.give() is None


def test_an_answer_to_a_task_that_was_given_back_is_refused(scene: Collecting) -> None:
    task = scene.give()
    assert task is not None
    scene.decline(task)
    with pytest.raises(GymError) as refused:
        scene.client.call("Submit", pb.SubmitRequest(message_id=task))
    assert refused.value.code is ErrorCode.LEASE_LOST
