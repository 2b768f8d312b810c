"""A full disk on either side is named, waited out, and ends neither a round nor a contributor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, random_delta
from tests.support.hub import HubProcess, start_client
from tests.support.small_disk import small_disk, why_not
from tests.support.wait import SECONDS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CONFIG: dict[str, Any] = {
    "rounds": {"num_rounds": 1, "min_contributors": 1, "deadline_seconds": 1800, "lease_seconds": 60},
    "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    "recipe": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 32},
}


def states(hub: HubProcess) -> list[str]:
    return [row["state"] for row in hub.ask("rounds")]


def test_a_contributor_whose_home_of_5_mb_is_full_waits_with_its_lease_and_goes_on_when_there_is_room(
    tmp_path: Path, tiny_base: Path
) -> None:
    hub, home = HubProcess(tmp_path / "hub", CONFIG, str(tiny_base)).start(), tmp_path / "home"
    try:
        with small_disk(tmp_path / "disk", 5) as disk:
            os.symlink(disk.folder, home)
            client = start_client(home, hub, "--base", str(tiny_base))
            log = disk.folder / "client.log"
            hub.wait_for("the join", lambda: "joined" in log.read_text(), 2 * SECONDS)
            disk.fill(leave_bytes=8192)
            # What it prints about the disk goes to the log that is on the disk: a page of it is left.
            hub.wait_for("the wait", lambda: "disk-full: " in log.read_text(), SECONDS)
            assert client.poll() is None
            assert states(hub) == ["collecting"]
            disk.make_room()
            assert client.wait(timeout=2 * SECONDS) == 0, log.read_text()
            assert "the disk has free space again" in log.read_text()
        assert states(hub) == ["committed"]
    finally:
        hub.stop()


def test_a_hub_below_its_reserve_says_so_and_opens_no_round_and_one_that_fills_up_in_mid_round_loses_nothing(
    tmp_path: Path, tiny_base: Path
) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        storage = {"database": f"sqlite:///{disk.folder}/hub.db", "reserve_bytes": 4 << 20}
        hub = HubProcess(tmp_path / "hub", {**CONFIG, "storage": storage}, str(tiny_base))
        disk.fill(leave_bytes=3 << 20)
        hub.start()
        try:
            hub.wait_for("the report", lambda: "no round opens until there is free space" in hub.log())
            assert "below the reserve of 4.2 MB (storage.reserve_bytes)" in hub.log()
            one = RawContributor(hub.address, "one").enrol()
            assert states(hub) == []
            disk.make_room()
            task = one.next_task()

            disk.fill()
            beat = pb.HeartbeatRequest(message_id=task.message_id, phase="train", total=9)
            for _ in range(200):  # the database's log may have some room of its own
                try:
                    one.call(one.stub.Heartbeat, beat)
                except GymError as error:
                    assert error.code is ErrorCode.DISK_FULL, error  # noqa: PT017 (the loop needs the handler)
                    break
            else:
                raise AssertionError("the disk never was full")
            disk.make_room()
            one.call(one.stub.Heartbeat, beat)
            delta = random_delta(tmp_path, one.status.base_digest, 1, str(tiny_base))
            assert one.contribute(delta, task)["verdict"] == "admitted"
            hub.wait_for("the commit", lambda: states(hub) == ["committed"])
        finally:
            hub.stop()
