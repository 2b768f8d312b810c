"""Fifty kilobytes of references to gigabytes: refused at the door, and harmless where they are stored already."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import DELTA_STYPE
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, random_delta
from tests.support.hub import HubProcess
from tests.support.quick import quick

MIB = 1 << 20
OBJECT = bytes(MIB)
NAME = hashlib.sha256(OBJECT).hexdigest()
HONEST = 2


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[HubProcess]:
    config = {
        "rounds": {
            "num_rounds": 2,
            "min_contributors": HONEST,
            "deadline_seconds": 600,
            "lease_seconds": 600,
            "grace_min_seconds": 1,
            "grace_max_seconds": 1,
        },
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
    }
    found = HubProcess(tmp_path / "hub", config, str(tiny_base)).start()
    yield found
    found.stop()


@pytest.fixture
def attacker(hub: HubProcess) -> Iterator[RawContributor]:
    found = RawContributor(hub.address, "attacker").enrol()
    found.upload(OBJECT)
    yield found
    found.close()


def amplified(task: pb.Task, count: int, update: bool = False) -> pb.SubmitRequest:
    """A reply whose ``count`` references all name the one object of 1 MiB."""
    records = pb.Records(order=["arrays"])
    for index in range(count):
        records.arrays["arrays"].arrays.append(reference(str(index)))
    if update:
        records.order.append("update")
        records.configs["update"].entries.append(pb.Entry(key="manifest", value=pb.Value(text="{}")))
    return pb.SubmitRequest(message_id=task.message_id, content=records)


def reference(name: str) -> pb.ArrayRef:
    return pb.ArrayRef(
        name=name,
        dtype="uint8",
        shape=[len(OBJECT) - 128],
        stype="numpy.ndarray",
        sha256=NAME,
        size_bytes=len(OBJECT),
    )


def refused(attacker: RawContributor, request: pb.SubmitRequest) -> GymError:
    with pytest.raises(GymError) as caught:
        attacker.call(attacker.stub.Submit, request)
    assert caught.value.code in (ErrorCode.TOO_LARGE, ErrorCode.UPDATE_REFUSED), caught.value
    return caught.value


def rss_bytes(hub: HubProcess) -> int:
    for line in Path(f"/proc/{hub.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def commit_with(hub: HubProcess, honest: list[RawContributor], folder: Path, base: str) -> None:
    """The honest contributors' updates make the next version."""
    before = hub.ask("status")["version"]
    for seed, one in enumerate(honest):
        delta = random_delta(folder, hub.ask("status")["version_digest"], 10 * before + seed, base)
        assert one.contribute(delta)["verdict"] == "admitted"
    hub.wait_for("a commit", lambda: hub.ask("status")["version"] == before + 1)


@pytest.mark.parametrize("count", quick([500, 1_400], 1_400))
def test_a_reply_with_many_references_to_one_object_is_refused_and_memory_stays_flat(
    hub: HubProcess, attacker: RawContributor, tmp_path: Path, tiny_base: Path, count: int
) -> None:
    task = attacker.next_task()
    before = hub.peak_memory_bytes()
    refused(attacker, amplified(task, count))
    refused(attacker, amplified(task, count, update=True))
    refused(attacker, amplified(task, 2))
    refused(attacker, amplified(task, 1))  # even one is more than a task without arrays allows
    assert hub.peak_memory_bytes() - before < 50 * MIB
    honest = [RawContributor(hub.address, f"c{i}").enrol() for i in range(HONEST)]
    commit_with(hub, honest, tmp_path, str(tiny_base))
    for one in honest:
        one.close()


@pytest.mark.parametrize("update", quick([False, True], True))
def test_a_poisonous_reply_in_the_database_is_set_aside_and_the_round_commits_with_the_others(
    hub: HubProcess, attacker: RawContributor, tmp_path: Path, tiny_base: Path, update: bool
) -> None:
    honest = [RawContributor(hub.address, f"c{i}").enrol() for i in range(HONEST)]
    task = attacker.next_task()
    for one in honest:
        one.held = one.next_task()  # type: ignore[attr-defined]
    hub.kill()
    with sqlite3.connect(hub.folder / "hub.db") as database:
        database.execute(
            "UPDATE messages SET state = 'replied', receipt = '{\"verdict\": \"received\"}', reply = ?"
            " WHERE message_id = ?",
            (amplified(task, 1_400, update).SerializeToString(), task.message_id),
        )
    hub.start()
    before = rss_bytes(hub)
    hub.wait_for("the verdict", lambda: hub.ask("rounds")[0]["set_aside"])
    assert rss_bytes(hub) - before < 50 * MIB
    # The verdict is committed before it is logged: a kill between the two would lose the line.
    hub.wait_for("the log line", lambda: "its reply is set aside" in hub.log())
    hub.kill()
    hub.start()  # it does not meet the reply again
    digest = hub.ask("status")["version_digest"]
    for seed, one in enumerate(honest):
        delta = random_delta(tmp_path, digest, seed, str(tiny_base))
        assert one.contribute(delta, one.held)["verdict"] == "admitted"  # type: ignore[attr-defined]
    rounds = hub.wait_for("commit", lambda: [r for r in hub.ask("rounds") if r["state"] == "committed"])
    assert {u["name"] for u in rounds[0]["updates"] if u["verdict"] == "merged"} == {"c0", "c1"}
    (aside,) = rounds[0]["set_aside"]
    assert (aside["name"], aside["verdict"]) == ("attacker", "set-aside")
    assert ("one delta" if update else "1400 references") in aside["reason"]
    assert hub.log().count("its reply is set aside") == 1
    verdicts = [e["body"] for e in hub.ask("ledger", "show") if e["kind"] == "verdict"]
    assert [v["contributor"] for v in verdicts if v["verdict"] == "set-aside"] == [attacker.key.contributor]
    assert hub.ask("ledger", "verify")["valid"]
    for one in honest:
        one.close()


def test_a_reply_that_does_not_fit_its_objects_is_refused(hub: HubProcess, attacker: RawContributor) -> None:
    small = b"\x93NUMPY" + bytes(200)
    attacker.upload(small)
    name = hashlib.sha256(small).hexdigest()
    task = attacker.next_task()

    def reply(**changes: object) -> pb.SubmitRequest:
        fields: dict[str, object] = {
            **{"name": "a", "dtype": "uint8", "shape": [78], "stype": "numpy.ndarray"},
            **{"sha256": name, "size_bytes": len(small)},
        }
        records = pb.Records(order=["arrays"])
        records.arrays["arrays"].arrays.append(pb.ArrayRef(**{**fields, **changes}))  # type: ignore[arg-type]
        return pb.SubmitRequest(message_id=task.message_id, content=records)

    assert "the object has 206" in refused(attacker, reply(size_bytes=205)).message
    assert "make" in refused(attacker, reply(shape=[2**40])).message
    assert "make" in refused(attacker, reply(shape=[2**63] * 30)).message
    assert "dtype" in refused(attacker, reply(dtype="O")).message
    assert "dtype" in refused(attacker, reply(dtype="float32," * 4)).message
    assert "shape" in refused(attacker, reply(stype=DELTA_STYPE)).message
    many = pb.SubmitRequest(message_id=task.message_id, content=pb.Records(order=["m"]))
    many.content.metrics["m"].entries.add(key="k", value=pb.Value(integers=pb.Integers(values=[0] * 200_000)))
    assert "values" in refused(attacker, many).message
    empty = pb.SubmitRequest(message_id=task.message_id, content=pb.Records(order=["m"]))
    empty.content.metrics["m"].entries.add(key="k", value=pb.Value(text="a metric is a number"))
    assert "not Flower content" in refused(attacker, empty).message
    long = pb.SubmitRequest(message_id=task.message_id, error=pb.ReplyError(code=1, reason="x" * 3_000))
    refused(attacker, long)
    assert attacker.call(attacker.stub.Submit, reply()).receipt_json  # what fits is kept
