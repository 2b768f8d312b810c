"""Wrong clocks: set in the middle of a round, on either side and in either direction, they end nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, random_delta
from tests.support.hub import HubProcess, start_client
from tests.support.shifted_clock import ShiftedClock, why_not
from tests.support.wait import SECONDS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

HOUR = 3600
CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 2, "min_contributors": 1, "deadline_seconds": 1800, "lease_seconds": 60},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 32},
}


@contextmanager
def running(hub: HubProcess, clock: ShiftedClock | None = None) -> Iterator[HubProcess]:
    hub.start(environment=None if clock is None else clock.environment)
    try:
        yield hub
    finally:
        hub.stop()


def beat(one: RawContributor, task: pb.Task) -> None:
    one.call(one.stub.Heartbeat, pb.HeartbeatRequest(message_id=task.message_id, phase="train", total=9))


def states(hub: HubProcess) -> list[str]:
    return [row["state"] for row in hub.ask("rounds")]


def test_a_hub_whose_clock_is_set_in_mid_round_keeps_its_round_its_lease_and_its_sessions(
    tmp_path: Path, tiny_base: Path
) -> None:
    clock, hub = ShiftedClock(tmp_path / "clock"), HubProcess(tmp_path / "hub", CONFIG, str(tiny_base))
    with running(hub, clock):
        one = RawContributor(hub.address, "one").enrol()
        task = one.next_task()
        for seconds, side in ((6 * HOUR, "6 h 0 min forward"), (-6 * HOUR, "12 h 0 min back")):
            clock.set(seconds)
            hub.wait_for("a line on the clock", lambda side=side: f"clock was set {side}" in hub.log())
            beat(one, task)  # the session and the lease are those of before
            one.enrol()  # a new login, signed by a clock that was not set
            assert states(hub) == ["collecting"]
        delta = random_delta(tmp_path, one.status.base_digest, 1, str(tiny_base))
        assert one.contribute(delta, task)["verdict"] == "admitted"
        hub.wait_for("the commit", lambda: "committed" in states(hub))


@pytest.mark.slow
def test_a_hub_that_begins_again_with_a_wrong_clock_continues_the_round_that_was_under_way(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub = HubProcess(tmp_path / "hub", CONFIG, str(tiny_base))
    with running(hub):
        one = RawContributor(hub.address, "one").enrol()
        task = one.next_task()
        beat(one, task)
        hub.kill()
    with running(hub, ShiftedClock(tmp_path / "clock", 6 * HOUR)):
        beat(one, task)
        assert states(hub) == ["collecting"]
        delta = random_delta(tmp_path, one.status.base_digest, 1, str(tiny_base))
        assert one.contribute(delta, task)["verdict"] == "admitted"
        hub.wait_for("the commit", lambda: "committed" in states(hub))


@pytest.mark.slow
def test_a_contributor_in_1970_is_warned_works_and_is_not_stopped_when_its_clock_is_set_in_mid_round(
    tmp_path: Path, tiny_base: Path
) -> None:
    clock = ShiftedClock(tmp_path / "clock")
    clock.set_to(2.0 * 24 * HOUR)
    hub = HubProcess(
        tmp_path / "hub", {**CONFIG, "recipe": {**CONFIG["recipe"], "max_steps": 100}}, str(tiny_base)
    )
    with running(hub):
        home = tmp_path / "home"
        client = start_client(home, hub, "--base", str(tiny_base), environment=clock.environment)

        def log() -> str:
            return (home / "client.log").read_text()

        hub.wait_for("training", lambda: "training 1" in log(), 2 * SECONDS)
        clock.set(6 * HOUR)
        hub.wait_for("two versions", lambda: states(hub) == ["committed"] * 2, 2 * SECONDS)
        assert client.wait(timeout=SECONDS) == 0, log()
    text = " ".join(log().split())
    assert "this machine's clock (1970-01-03 00:00 UTC) is 20" in text
    assert "behind the hub's" in text
    assert "set this machine's clock: it shows a time before this version of gym-fed was released" in text
    assert "ahead of the hub's" in text  # of the second round, after the clock was set


@pytest.mark.slow
@pytest.mark.parametrize("side", ["hub", "contributor"])
def test_a_clock_that_jumps_back_and_then_forth_in_mid_round_ends_nothing_and_its_side_is_named(
    side: str, tmp_path: Path, tiny_base: Path
) -> None:
    clock = ShiftedClock(tmp_path / "clock")
    hub = HubProcess(
        tmp_path / "hub",
        {
            **CONFIG,
            "rounds": {**CONFIG["rounds"], "num_rounds": 3},
            "recipe": {**CONFIG["recipe"], "max_steps": 100},
        },
        str(tiny_base),
    )
    with running(hub, clock if side == "hub" else None):
        home = tmp_path / "home"
        environment = clock.environment if side == "contributor" else None
        client = start_client(home, hub, "--base", str(tiny_base), environment=environment)

        def log() -> str:
            return " ".join((home / "client.log").read_text().split())

        def is_training(server_round: int) -> bool:
            _, task, after = log().partition(f"round {server_round}: task")
            return bool(task) and "training" in after

        for server_round, seconds in ((1, -6 * HOUR), (2, 6 * HOUR)):
            hub.wait_for(f"round {server_round}", lambda n=server_round: is_training(n), 2 * SECONDS)
            clock.set(seconds)
        hub.wait_for("three versions", lambda: states(hub) == ["committed"] * 3, 3 * SECONDS)
        assert client.wait(timeout=SECONDS) == 0, log()
    ahead, behind = log().find("6 h 0 min ahead of the hub's"), log().find("6 h 0 min behind the hub's")
    if side == "hub":
        assert -1 < ahead < behind, log()
        assert log().count("the coordinator should set the hub's clock: it was set while the hub ran") == 2
        assert hub.log().index("clock was set 6 h 0 min back") < hub.log().index(
            "clock was set 12 h 0 min forward"
        )
    else:
        assert -1 < behind < ahead, log()
        assert log().count("set this machine's clock: it was set while gym-client ran") == 2
        assert "clock was set" not in hub.log()
    for words in ("retrying", "check the address", "error"):
        assert words not in log()
