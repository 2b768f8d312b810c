"""Work streams that follow each other: no task is lost with a stream whose caller has gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.hub.transport import HubClient

from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "hub")
    yield hub
    hub.close()


def test_a_task_leased_by_a_stream_that_was_replaced_goes_to_the_newer_one(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, lease = hub.fed.queue, hub.fed.queue.lease
    older_leases, newer_found_none, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow_lease(node_id: int):  # type: ignore[no-untyped-def]
        if not older_leases.is_set():
            older_leases.set()
            assert go_on.wait(SECONDS)
            return lease(node_id)
        found = lease(node_id)
        newer_found_none.set()
        return found

    monkeypatch.setattr(queue, "lease", slow_lease)
    monkeypatch.setattr("gym_server.rpc.streams._TOUCH_SECONDS", 0.1)
    client: HubClient = hub.client(tmp_path / "ada")
    older = client.stream("Work", pb.WorkRequest(), SECONDS)
    assert older_leases.wait(SECONDS)
    newer = client.stream("Work", pb.WorkRequest(), SECONDS)
    assert newer_found_none.wait(SECONDS)
    sent = queue.push(client.node_id, "1", "train", queue.now(), 3600.0, pb.Records().SerializeToString())
    older.cancel()
    go_on.set()
    received = next(event.task.message_id for event in newer if event.HasField("task"))
    assert received == sent
    newer.cancel()
    client.close()
