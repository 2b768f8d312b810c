"""A coordinator pauses and resumes the rounds, and ends the one under way, beside a hub that may be running."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gym_server.cli.live import changes, region
from gym_server.cli.main import app
from gym_server.cli.show import status_of, status_table
from gym_server.cli.snapshot import read_snapshot
from gym_server.federation import Federation
from gym_server.rounds.steering import MAX_WHY, is_coordinators
from gym_server.strategy import DeltaSoup
from gym_server.strategy.backoff import RoundBackoff, end_wait, paused
from gym_server.strategy.tasks import new_task
from gym_server.web.home import snapshot
from typer.testing import CliRunner

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS

BACKUP = "the disk is copied"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    found = LoopbackHub(
        tmp_path / "hub", rounds={"backoff_seconds": 600, "backoff_max_seconds": 600, "min_contributors": 1}
    )
    yield found
    found.close()


@pytest.fixture
def fed(hub: LoopbackHub) -> Federation:
    return hub.fed


def entries(fed: Federation, *kinds: str) -> list[dict[str, Any]]:
    return [entry.body for entry in fed.ledger.entries() if entry.kind in kinds]


def collecting(fed: Federation) -> int:
    number = fed.round_store.open_next().server_round
    fed.round_store.start_collecting(number, new_task(fed.state, fed.config, fed.max_update_bytes, number))
    return number


def grid(nodes: list[int], on_look: Any = lambda: None) -> Any:
    def get_node_ids() -> list[int]:
        on_look()
        return nodes

    return SimpleNamespace(get_node_ids=get_node_ids, push_messages=lambda _: [], pull_messages=lambda _: [])


# ---- pause ----


def test_a_pause_holds_over_a_restart_until_it_is_ended_and_the_ledger_has_both(hub: LoopbackHub) -> None:
    hub.fed.steering.pause(BACKUP)
    with Federation.open(hub.fed.folder) as again:
        pause = again.steering.paused()
        assert pause is not None
        assert str(pause) == f"the hub is paused: {BACKUP}"
        again.steering.resume()
    assert hub.fed.steering.paused() is None
    said = entries(hub.fed, "paused", "resumed")
    assert [{key: 0 if key == "at" else body[key] for key in body if key != "heads"} for body in said] == [
        {"by": "coordinator", "reason": BACKUP, "at": 0},
        {"by": "coordinator", "at": 0},
    ]
    assert hub.fed.ledger.verify()["entries"] == 2


def test_a_second_pause_gives_another_reason_and_the_same_one_is_refused(fed: Federation) -> None:
    fed.steering.pause()
    assert str(fed.steering.paused()) == "the hub is paused"
    fed.steering.pause("holidays")
    assert str(fed.steering.paused()) == "the hub is paused: holidays"
    for act in (lambda: fed.steering.pause(" holidays "), lambda: fed.steering.pause("a\nb")):
        with pytest.raises(GymError) as refused:
            act()
        assert refused.value.code is ErrorCode.USAGE
    with pytest.raises(GymError, match=f"longer than {MAX_WHY}"):
        fed.steering.pause("x" * (MAX_WHY + 1))
    fed.steering.resume()
    with pytest.raises(GymError, match="not paused"):
        fed.steering.resume()


def test_a_round_under_way_goes_on_through_a_pause_and_ends_with_now(fed: Federation) -> None:
    number = collecting(fed)
    assert fed.steering.pause(BACKUP) is None
    assert fed.round_store.require(number).state == "collecting"
    assert fed.steering.pause(BACKUP, now=True) == number
    ended = fed.round_store.require(number)
    assert (ended.state, ended.reason) == (
        "aborted",
        f"ended by the coordinator, who paused the hub: {BACKUP}",
    )
    assert len(entries(fed, "paused")) == 1, "the pause was there already"
    assert fed.ledger.verify()["entries"] == 2


def test_a_paused_hub_opens_no_round_and_gives_out_no_task_of_an_open_one(fed: Federation) -> None:
    looks: list[int] = []
    strategy = DeltaSoup(fed, should_stop=lambda: len(looks) > 2 or bool(looks.append(1)))
    fed.steering.pause()
    strategy.start(grid([]), num_rounds=1)
    assert fed.round_store.current() is None
    opened = fed.round_store.open_next()
    looks.clear()
    strategy.start(grid([7]), num_rounds=1)
    assert fed.round_store.require(opened.server_round).state == "open"


def test_contributors_get_a_notice_of_a_pause_and_of_its_end(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_server.rpc.streams._TOUCH_SECONDS", 0.1)
    with hub.client(tmp_path / "ann") as client:
        hub.fed.steering.pause(BACKUP)
        assert client.status().paused == f"the hub is paused: {BACKUP}"
        stream = client.stream("Work", pb.WorkRequest(), SECONDS)
        notices = (event.notice for event in stream if event.HasField("notice"))
        first = next(notices)
        assert (first.kind, first.message) == ("paused", f"the hub is paused: {BACKUP}")
        hub.fed.steering.resume()
        assert next(notices).kind == "resumed"
        stream.cancel()
        assert client.status().paused == ""


def test_status_live_view_and_dashboard_show_the_pause(fed: Federation) -> None:
    before = read_snapshot(fed.state, fed.config, fed.lease_histories)
    fed.steering.pause(BACKUP)
    said = f"the hub is paused: {BACKUP}"
    assert said in str(
        status_table(status_of(fed.state, fed.config, fed.steering, fed.payouts, fed.fingerprint)).title
    )
    assert (
        status_of(fed.state, fed.config, fed.steering, fed.payouts, fed.fingerprint)["pause"]["why"] == BACKUP
    )
    assert snapshot(fed.state, fed.config, fed.lease_histories)["pause"] == said
    now = read_snapshot(fed.state, fed.config, fed.lease_histories)
    assert [(event.kind, event.text) for event in changes(before, now)] == [("paused", said)]
    assert [event.kind for event in changes(now, before)] == ["resumed"]
    assert said in str(region(now))


# ---- skip ----


def test_skip_aborts_the_round_and_the_hub_takes_that_for_no_failure(fed: Federation) -> None:
    ended: list[str] = []

    def look_on() -> None:
        current = fed.round_store.current()
        if current is not None and current.state == "collecting":
            fed.steering.skip("too few")

    strategy = DeltaSoup(
        fed, should_stop=lambda: len(ended) == 2, on_round=lambda round_: ended.append(round_.reason)
    )
    strategy.start(
        grid([7], look_on), num_rounds=1
    )  # with a wait of ten minutes between them it would not end
    assert ended == ["skipped by the coordinator: too few"] * 2
    assert [body["reason"] for body in entries(fed, "aborted")] == ended
    assert all(map(is_coordinators, ended))
    assert fed.ledger.verify()


def test_skip_takes_the_tasks_of_the_round_back(fed: Federation) -> None:
    number = collecting(fed)
    task = fed.queue.push(7, str(number), "train", time.time(), 600.0, b"spec")
    held = fed.queue.lease(7)
    assert held is not None
    assert held.message_id == task
    fed.steering.skip()
    ended = fed.queue.get(task)
    assert ended is not None
    assert ended.state == "late"
    with pytest.raises(GymError, match="its round continued without it"):
        fed.queue.renew(task, 7, "")


def test_a_merge_that_the_coordinator_ends_leaves_nothing_behind(
    fed: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_server.strategy import durable

    number = collecting(fed)
    fed.round_store.start_merging(number)
    left = fed.folder / "residuals" / f"round-{number}.safetensors"

    def merge(*_: Any) -> None:
        left.parent.mkdir(exist_ok=True)
        left.touch()
        fed.steering.skip()
        fed.round_store.abort(number, "too late")

    monkeypatch.setattr(durable, "merge_round", merge)
    strategy = DeltaSoup(fed)
    monkeypatch.setattr(strategy, "_hub_model", lambda: SimpleNamespace(freed_afterwards=nullcontext))
    ended = strategy._finish(fed.round_store.require(number))
    assert ended.reason == "skipped by the coordinator"
    assert not left.exists()


def test_skip_ends_the_wait_after_rounds_that_failed(fed: Federation) -> None:
    waits: list[bool] = []

    def stop() -> bool:
        if paused(fed.database) is not None:
            waits.append(end_wait(fed.database))
        return len(waits) > 1

    RoundBackoff(fed.state, fed.live_config, fed.queue, grid([]), stop).failed(1, "nobody came")
    assert waits == [True], "ten minutes, ended at the first look"
    assert not end_wait(fed.database)


# ---- commands ----


def test_the_commands_say_what_they_did(hub: LoopbackHub) -> None:
    at = ["--dir", str(hub.fed.folder), "--json"]
    number = collecting(hub.fed)

    def run(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, *at])
        return json.loads(done.stdout) if done.exit_code == 0 else done.exception

    assert run("pause", "--reason", BACKUP) == {"paused": True, "reason": BACKUP, "aborted_round": None}
    assert run("skip", "--reason", "no") == {"aborted_round": number, "ended_wait": False}
    refused = run("skip")
    assert isinstance(refused, GymError)
    assert refused.code is ErrorCode.NOT_FOUND
    assert run("resume") == {"paused": False}
