"""The agent with strangers' Flower apps and a hub that misbehaves: tasks, refusals, lost leases, restarts."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from gym_client.agent.agent import AgentResult
from gym_client.agent.hooks import current_hooks
from gym_client.agent.policy import Policy
from gym_client.hub.transport import HubClient
from gym_client.identity.pins import ServerPin

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.records import from_wire
from gym_fed.trust.wire.references import references
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.agent_scene import Scene, empty


def test_any_flower_app_gets_its_arrays_and_its_reply_goes_back_as_objects(scene: Scene) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)

    def double(message: Message, context: Context) -> RecordDict:
        doubled = [2 * array for array in message.content["arrays"].to_numpy_ndarrays()]
        assert message.content["config"]["lr"] == 0.5
        return RecordDict({"arrays": ArrayRecord(doubled), "metrics": MetricRecord({"num-examples": 4})})

    content = RecordDict({"arrays": ArrayRecord([weights]), "config": ConfigRecord({"lr": 0.5})})
    scene.hub.give(scene.task("m1", content))
    result = scene.agent(double).run(max_rounds=1)
    assert result.num_submitted == 1
    reply = from_wire(scene.hub.submitted["m1"].content, lambda ref: scene.hub.objects[ref.sha256])
    assert np.array_equal(reply["arrays"].to_numpy_ndarrays()[0], 2 * weights)
    assert reply["metrics"]["num-examples"] == 4
    assert scene.hub.heartbeats[0] == "m1"
    assert list(scene.home.objects.iterdir()) == []  # arrays of a round are not hoarded


def test_the_context_lasts_over_the_rounds_of_a_run(scene: Scene) -> None:
    seen: list[int] = []

    def count(message: Message, context: Context) -> RecordDict:
        before = context.state.get("count")
        seen.append(int(before["n"]) if before is not None else 0)
        context.state["count"] = ConfigRecord({"n": seen[-1] + 1})
        assert context.node_config["by-reference"] is True
        return RecordDict()

    for name in ("m1", "m2", "m3"):
        scene.hub.give(scene.task(name))
    scene.hub.finish()
    assert scene.agent(count).run() == AgentResult([{"verdict": "received"}] * 3, True, 3)
    assert seen == [0, 1, 2]
    assert [r["task"] for r in scene.home.receipts()] == ["m1", "m2", "m3"]


def test_an_app_that_raises_is_reported_and_the_next_task_is_done(scene: Scene) -> None:
    def fail_once(message: Message, context: Context) -> RecordDict:
        if message.metadata.message_id == "m1":
            raise ZeroDivisionError("oops")
        return RecordDict()

    scene.hub.give(scene.task("m1"))
    scene.hub.give(scene.task("m2"))
    assert scene.agent(fail_once).run(max_rounds=1).num_submitted == 1
    assert "oops" not in scene.error_of("m1").reason  # it may be from a row
    assert "oops" in scene.display.texts("failed")[0]
    assert scene.hub.submitted["m2"].HasField("content")


def test_three_failures_in_a_row_end_the_agent(scene: Scene) -> None:
    def fail(message: Message, context: Context) -> RecordDict:
        raise ValueError("no")

    for name in ("m1", "m2", "m3", "m4"):
        scene.hub.give(scene.task(name))
    with pytest.raises(GymError, match="no"):
        scene.agent(fail).run()
    assert set(scene.hub.submitted) == {"m1", "m2", "m3"}


def test_a_task_with_an_unknown_key_is_refused_before_anything_is_fetched(scene: Scene) -> None:
    spec = {"format": "gym-task-1", "run": "rm -rf /"}
    arrays = ArrayRecord({"x": Array(np.ones(1000))})
    scene.hub.give(
        scene.task("m1", RecordDict({"task": ConfigRecord({"spec": json.dumps(spec)}), "soups": arrays}))
    )
    scene.hub.finish()
    scene.agent(empty).run()
    error = scene.error_of("m1")
    assert error.code == ErrorCode.POLICY_REFUSED.exit_code
    assert "run: unknown key" in error.reason
    assert scene.hub.download_offsets == []


def test_a_task_for_updates_signed_for_another_hub_is_refused(scene: Scene) -> None:
    base = "sha256:" + "a" * 64
    spec = {
        "server": "s" + "f" * 16,
        "server_round": 1,
        "base_model": "tiny",
        "base_digest": base,
        "version_digest": base,
        "max_update_bytes": 1000,
        "deadline_seconds": 4e9,
    }
    scene.client.status()
    scene.hub.give(scene.task("m1", RecordDict({"task": ConfigRecord({"spec": json.dumps(spec)})})))
    scene.hub.finish()
    scene.agent(empty).run()
    assert "signed for the same hub" not in scene.error_of("m1").reason
    assert f"was sent by {scene.hub.server}" in scene.error_of("m1").reason


def test_suites_of_a_hub_that_rows_are_not_checked_against_are_shown_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "no evaluation sets"))
    base = "sha256:" + "a" * 64
    spec = {
        "server": scene.hub.server,
        "server_round": 1,
        "base_model": "tiny",
        "base_digest": base,
        "version_digest": base,
        "max_update_bytes": 1000,
        "deadline_seconds": 4e9,
        "evaluated_on": {"winogrande": "0" * 64},
    }
    for name in ("m1", "m2"):
        scene.hub.give(scene.task(name, RecordDict({"task": ConfigRecord({"spec": json.dumps(spec)})})))
    scene.hub.finish()
    scene.agent(empty).run()
    (note,) = scene.display.texts("contamination")
    assert "gym eval fetch winogrande" in note


def test_a_task_that_needs_too_many_bytes_is_refused(scene: Scene) -> None:
    scene.hub.give(scene.task("m1", RecordDict({"arrays": ArrayRecord([np.ones(1000)])})))
    scene.hub.finish()
    scene.agent(empty, Policy(max_download_bytes=1000)).run()
    assert "max_download_bytes of 1000" in scene.error_of("m1").reason
    assert scene.hub.download_offsets == []


def test_a_task_that_names_one_object_a_thousand_times_takes_its_memory_once(scene: Scene) -> None:
    held: list[int] = []

    def count(message: Message, context: Context) -> RecordDict:
        arrays = message.content.array_records["arrays"]
        held.extend({id(array.data): len(array.data) for array in arrays.values()}.values())
        assert len(arrays) == 1000
        return RecordDict()

    task = scene.task("m1", RecordDict({"arrays": ArrayRecord([np.ones(100_000)])}))
    first = task.content.arrays["arrays"].arrays[0]
    for number in range(1, 1000):
        task.content.arrays["arrays"].arrays.add().CopyFrom(first)
        task.content.arrays["arrays"].arrays[number].name = str(number)
    scene.hub.give(task)
    scene.agent(count).run(max_rounds=1)
    assert sum(held) == first.size_bytes
    assert len(scene.hub.download_offsets) == 1


def test_a_task_whose_order_repeats_a_record_is_refused_before_anything_is_fetched(scene: Scene) -> None:
    task = scene.task("m1", RecordDict({"arrays": ArrayRecord([np.ones(1000)])}))
    task.content.order.extend(["arrays"] * 10_000)
    scene.hub.give(task)
    scene.hub.finish()
    scene.agent(empty).run()
    assert "names in their order" in scene.error_of("m1").reason
    assert scene.hub.download_offsets == []
    assert len(references(task.content)) == 1


def test_a_problem_of_this_machine_ends_the_agent_and_reaches_the_hub(scene: Scene) -> None:
    def no_model(message: Message, context: Context) -> RecordDict:
        raise GymError(ErrorCode.MODEL_NOT_FOUND, "no model here", "get one")

    scene.hub.give(scene.task("m1"))
    with pytest.raises(GymError, match="no model here"):
        scene.agent(no_model).run()
    assert scene.error_of("m1").code == ErrorCode.MODEL_NOT_FOUND.exit_code


@pytest.mark.parametrize("code", [ErrorCode.DATA_INVALID, ErrorCode.MODEL_INVALID, ErrorCode.INTERNAL])
def test_what_a_bases_template_writes_into_an_error_stays_on_this_machine(
    scene: Scene, code: ErrorCode
) -> None:
    def rejected(message: Message, context: Context) -> RecordDict:
        raise GymError(code, "/data/ann/rows.jsonl:3: the model's chat template rejects it: my secret row")

    scene.hub.give(scene.task("m1"))
    scene.hub.finish()
    with suppress(GymError):
        scene.agent(rejected).run()
    assert "my secret row" in scene.display.texts("failed")[0]
    assert scene.error_of("m1").reason.startswith(f"{code.value}: the reason stays with the contributor")


def test_an_error_about_the_task_reaches_the_hub_without_folders_of_this_machine(scene: Scene) -> None:
    def refused(message: Message, context: Context) -> RecordDict:
        raise GymError(ErrorCode.POLICY_REFUSED, "/data/ann/rows.jsonl: 3 rows are in the suite mine")

    scene.hub.give(scene.task("m1"))
    scene.hub.finish()
    scene.agent(refused).run()
    assert scene.error_of("m1").reason == "policy-refused: rows.jsonl: 3 rows are in the suite mine"


def test_a_lost_lease_stops_the_work_and_the_next_task_is_done(scene: Scene) -> None:
    stopped: list[bool] = []

    def lose(method: str, request: Any) -> None:
        if method == "Heartbeat" and request.message_id == "m1":
            raise GymError(ErrorCode.LEASE_LOST, "too late")

    def wait_for_stop(message: Message, context: Context) -> RecordDict:
        if message.metadata.message_id == "m1":
            while not current_hooks().should_stop():
                time.sleep(0.01)
            stopped.append(True)
            raise GymError(ErrorCode.INTERRUPTED, "stopped")
        return RecordDict()

    scene.hub.hook = lose
    scene.hub.give(scene.task("m1"))
    scene.hub.give(scene.task("m2"))
    assert scene.agent(wait_for_stop).run(max_rounds=1).num_submitted == 1
    assert stopped == [True]
    assert set(scene.hub.submitted) == {"m2"}
    assert "too late" in scene.display.texts("lost")[0]


def test_a_stale_reply_is_dropped_and_the_agent_goes_on(scene: Scene) -> None:
    def stale(method: str, request: Any) -> None:
        if method == "Submit" and request.message_id == "m1":
            raise GymError(ErrorCode.STALE, "round 1 is over")

    scene.hub.hook = stale
    scene.hub.give(scene.task("m1"))
    scene.hub.give(scene.task("m2"))
    assert scene.agent(empty).run(max_rounds=1).num_submitted == 1
    assert set(scene.hub.submitted) == {"m2"}


def test_a_hub_that_restarts_between_work_and_reply_gets_the_reply(scene: Scene) -> None:
    def restart(message: Message, context: Context) -> RecordDict:
        if message.metadata.message_id == "m1":
            scene.hub.stop()
            threading.Timer(1.0, scene.hub.start).start()
        return RecordDict({"arrays": ArrayRecord([np.ones(3)])})

    scene.hub.give(scene.task("m1"))
    agent = scene.agent(restart)
    scene.hub.give(scene.task("m2"))
    assert agent.run(max_rounds=2).num_submitted == 2
    assert scene.display.texts("away")
    assert set(scene.hub.submitted) == {"m1", "m2"}


def test_a_stream_that_breaks_is_opened_again(scene: Scene) -> None:
    scene.hub.events.put(None)
    scene.hub.give(scene.task("m1"))
    assert scene.agent(empty).run(max_rounds=1).num_submitted == 1


def test_a_contributor_that_was_revoked_ends_with_that_error(scene: Scene) -> None:
    def revoke(method: str, request: Any) -> None:
        if method == "Work":
            raise GymError(ErrorCode.PERMISSION_DENIED, "the key was revoked here")

    scene.hub.hook = revoke
    with pytest.raises(GymError, match="revoked") as caught:
        scene.agent(empty).run()
    assert caught.value.code is ErrorCode.PERMISSION_DENIED


def leave_elsewhere(scene: Scene) -> None:
    """Leave as `gym-client leave` does beside a running agent, whose client is not informed."""
    with HubClient(scene.home, scene.client.address, scene.client.pin) as other:
        other.call("Leave", pb.LeaveRequest())


@pytest.mark.parametrize("working", [False, True], ids=["waiting", "working"])
def test_leaving_beside_the_agent_ends_it_with_a_sentence(scene: Scene, working: bool) -> None:
    def leave(message: Message, context: Context) -> RecordDict:
        leave_elsewhere(scene)
        return RecordDict()

    def leave_once_it_waits(event: str, text: str, **fields: Any) -> None:
        record(event, text, **fields)
        if event == "waiting":
            leave_elsewhere(scene)

    scene.client.status()
    contributor, record = scene.client.pin.contributor, scene.display.report
    if working:
        scene.hub.give(scene.task("m1"))
    else:
        scene.display.report = leave_once_it_waits  # type: ignore[method-assign]
    assert scene.agent(leave).run() == AgentResult([], finished=False, balance=3)
    (sentence,) = scene.display.texts("left")
    assert sentence.startswith(f"{contributor} has left tiny; its contributions and credits stay there")
    kept = ServerPin.load(scene.home, scene.client.address)
    assert kept is not None
    assert (kept.contributor, kept.left) == ("", contributor)


def test_a_hub_that_no_longer_knows_an_active_account_ends_the_agent_with_its_error(scene: Scene) -> None:
    def refuse(method: str, request: Any) -> None:
        if method == "Work":
            raise GymError(ErrorCode.UNAUTHENTICATED, "not by this account")

    scene.hub.hook = refuse
    with pytest.raises(GymError, match="not by this account"):
        scene.agent(empty).run()
    assert scene.display.texts("left") == []
    assert scene.client.pin.contributor


def test_a_stop_while_waiting_is_an_interruption_that_says_how_to_go_on(scene: Scene) -> None:
    agent = scene.agent(empty)
    threading.Timer(0.3, agent.stop).start()
    with pytest.raises(GymError) as caught:
        agent.run()
    assert caught.value.code is ErrorCode.INTERRUPTED
    assert "same command" in caught.value.hint


def test_a_stop_while_the_hub_is_away_ends_the_waiting(scene: Scene) -> None:
    agent = scene.agent(empty)
    scene.hub.stop()
    threading.Timer(0.3, agent.stop).start()
    with pytest.raises(GymError) as caught:
        agent.run()
    assert caught.value.code is ErrorCode.INTERRUPTED
    scene.hub.start()


def receipt_of(scene: Scene, **changes: str) -> dict[str, Any]:
    body = {"contributor": "me", "update": "a" * 64, "verdict": "admitted"}
    proof = scene.hub.record("verdict", body).to_dict()
    proof["head"] |= changes
    return {"verdict": "admitted", "update": "a" * 64, "proof": proof}


@pytest.mark.parametrize("signature", ["00" * 64, "what"])
def test_a_receipt_with_a_false_signature_is_not_accepted(scene: Scene, signature: str) -> None:
    scene.client.status()
    scene.hub.receipt = receipt_of(scene, signature=signature)
    scene.hub.give(scene.task("m1"))
    with pytest.raises(GymError) as caught:
        scene.agent(empty).run(max_rounds=1)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    assert scene.home.receipts() == []


def test_a_receipt_that_says_other_things_than_its_entry_is_not_accepted(scene: Scene) -> None:
    scene.client.status()
    scene.hub.receipt = {**receipt_of(scene), "update": "b" * 64}
    scene.hub.give(scene.task("m1"))
    with pytest.raises(GymError, match="the receipt of update bbbbbbbbbbbb") as caught:
        scene.agent(empty).run(max_rounds=1)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_signed_receipt_is_kept(scene: Scene) -> None:
    scene.client.status()
    scene.hub.receipt = receipt_of(scene)
    scene.hub.give(scene.task("m1"))
    scene.agent(empty).run(max_rounds=1)
    assert scene.home.receipts()[0]["update"] == "a" * 64
