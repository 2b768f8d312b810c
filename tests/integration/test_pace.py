"""One contributor holds nobody: who only sends heartbeats, who answers errors, who runs three hundred installations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, random_delta
from tests.support.hub import HubProcess
from tests.support.wait import SECONDS

DEADLINE = 3_000
"""No test waits for it: what ends earlier ends by its own reason."""


@contextmanager
def running(folder: Path, base: Path, **rounds: Any) -> Iterator[HubProcess]:
    quick = {"grace_min_seconds": 1, "grace_max_seconds": 3, "backoff_seconds": 0.5, "backoff_max_seconds": 2}
    common = {"num_rounds": 50, "min_contributors": 2, "deadline_seconds": DEADLINE, "lease_seconds": 600}
    config = {
        "rounds": {**common, **quick, **rounds},
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    }
    hub = HubProcess(folder / "hub", config, str(base)).start()
    try:
        yield hub
    finally:
        hub.stop()


def fail(one: RawContributor, task: pb.Task, code: int = 20) -> None:
    error = pb.ReplyError(code=code, reason="data-invalid: no row can be used")
    one.call(one.stub.Submit, pb.SubmitRequest(message_id=task.message_id, error=error))


def beat(one: RawContributor, task: pb.Task) -> None:
    one.call(one.stub.Heartbeat, pb.HeartbeatRequest(message_id=task.message_id, phase="train", total=9))


def rounds_in(hub: HubProcess, state: str) -> list[dict[str, Any]]:
    return [r for r in hub.ask("rounds") if r["state"] == state]


@contextmanager
def connected(*contributors: RawContributor) -> Iterator[list[pb.Task]]:
    """Their work streams stay open; the list grows with every task that any of them is given."""
    tasks: list[pb.Task] = []

    def read(stream: Any) -> None:
        try:
            tasks.extend(event.task for event in stream if event.HasField("task"))
        except grpc.RpcError:
            return

    streams = [one.stub.Work(pb.WorkRequest(), metadata=one.metadata) for one in contributors]
    threads = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        yield tasks
    finally:
        for stream in streams:
            stream.cancel()
        for thread in threads:
            thread.join(SECONDS)


def test_one_that_only_sends_heartbeats_holds_nobody_and_its_late_work_gets_its_verdict(
    tmp_path: Path, tiny_base: Path
) -> None:
    with running(tmp_path, tiny_base) as hub:
        people = [RawContributor(hub.address, f"c{i}").enrol() for i in range(3)]
        tasks = [one.next_task() for one in people]
        digest = people[0].status.base_digest
        deltas = [random_delta(tmp_path, digest, seed, str(tiny_base)) for seed in range(3)]
        for one, task, delta in list(zip(people, tasks, deltas, strict=True))[:2]:
            assert one.contribute(delta, task)["verdict"] == "admitted"
            beat(one, task)  # one that crosses its own answer is no failure
        slow, held = people[2], tasks[2]
        beat(slow, held)

        (first,) = hub.wait_for("the merge without it", lambda: rounds_in(hub, "committed"))
        with pytest.raises(GymError, match="late: its round continued without it") as caught:
            beat(slow, held)
        assert caught.value.code is ErrorCode.LEASE_LOST
        assert sorted(u["name"] for u in first["updates"]) == ["c0", "c1"]
        assert slow.next_task().message_id != held.message_id  # the lease is free for the next round
        receipt = slow.contribute(deltas[2], held)
        assert (receipt["verdict"], receipt["code"]) == ("refused", "stale")
        assert receipt["reason"].startswith("late: round 1")
        entry = [e["body"] for e in hub.ask("ledger", "show") if e["sequence"] == receipt["ledger_sequence"]]
        assert entry[0]["reason"].startswith("stale: late")
        assert hub.log().count("Heartbeat refused") == 1  # the late one's, and no healthy one's


@pytest.mark.slow  # waits for seven rounds
def test_a_round_in_which_everybody_failed_ends_at_once_and_seven_of_them_do_not_end_the_hub(
    tmp_path: Path, tiny_base: Path
) -> None:
    with running(tmp_path, tiny_base, backoff_seconds=0.2, backoff_max_seconds=0.4) as hub:
        bad = RawContributor(hub.address, "bad").enrol()
        seen = set()
        with connected(bad) as tasks:

            def aborted() -> bool:
                for task in [t for t in tasks if t.message_id not in seen]:
                    seen.add(task.message_id)
                    fail(bad, task, code=1001)  # the hub's own code for a lost lease gives no second task
                return len(rounds_in(hub, "aborted")) >= 7

            hub.wait_for("seven aborted rounds", aborted)
            found = rounds_in(hub, "aborted")
            assert "1 contributor failed" in found[0]["reason"]
            assert len(seen) <= len(found) + 1  # one task a round, never the same round's again
            assert hub.process is not None
            assert hub.process.poll() is None
        honest = [RawContributor(hub.address, f"c{i}").enrol() for i in range(2)]
        digest = honest[0].status.base_digest
        for seed, one in enumerate(honest):
            delta = random_delta(tmp_path, digest, seed, str(tiny_base))
            assert one.contribute(delta)["verdict"] == "admitted"
        hub.wait_for("a commit", lambda: rounds_in(hub, "committed"))


@pytest.mark.slow  # waits for deadlines
def test_the_wait_after_aborted_rounds_is_in_status_and_ends_when_somebody_new_comes(
    tmp_path: Path, tiny_base: Path
) -> None:
    with running(tmp_path, tiny_base, backoff_seconds=500, backoff_max_seconds=500) as hub:
        bad = RawContributor(hub.address, "bad").enrol()
        fail(bad, bad.next_task())
        paused = hub.wait_for("the wait", lambda: hub.ask("status")["paused"])
        assert paused["failures"] == 1
        assert "0 of 2 updates: 1 contributor failed" in paused["reason"]
        assert paused["until"] - time.time() > 100
        with pytest.raises(GymError) as caught:
            bad.next_task(seconds=3)  # who spoilt the round does not end the wait by coming again
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
        new = RawContributor(hub.address, "new").enrol()
        assert new.next_task().metadata.group_id == "2"
        assert hub.ask("status")["paused"] is None
        assert len(rounds_in(hub, "aborted")) == 1


def test_one_account_with_many_installations_gets_one_task_a_round(tmp_path: Path, tiny_base: Path) -> None:
    with running(tmp_path, tiny_base) as hub:
        key = RawContributor(hub.address, "many").enrol().key
        many = [RawContributor(hub.address, "many", key) for _ in range(4)]
        for index, one in enumerate(many):
            one.enrol(instance=f"instance{index:04d}")
        with connected(*many) as tasks:
            hub.wait_for("a task", lambda: tasks)
            honest = RawContributor(hub.address, "honest").enrol()
            assert honest.next_task().metadata.group_id == "1"
            assert honest.call(honest.stub.Status, pb.StatusRequest()).num_connected == 2
            assert len(tasks) == 1


def test_an_error_reply_frees_its_lease_at_once(tmp_path: Path, tiny_base: Path) -> None:
    with running(tmp_path, tiny_base) as hub:
        people = [RawContributor(hub.address, f"c{i}").enrol() for i in range(3)]
        tasks = [one.next_task() for one in people]
        fail(people[0], tasks[0])
        digest = people[0].status.base_digest
        for seed, (one, task) in enumerate(zip(people[1:], tasks[1:], strict=True)):
            one.contribute(random_delta(tmp_path, digest, seed, str(tiny_base)), task)
        hub.wait_for("a merge without a grace period", lambda: rounds_in(hub, "committed"))
        assert "still at work" not in hub.log()
        assert people[0].next_task().metadata.group_id == "2"
