"""What a hub may make a contributor's machine hold, wait for, compute or store."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from gym_client.agent import task_objects
from gym_client.agent.hooks import Hooks
from gym_client.agent.kept_soups import KeptSoups
from gym_client.agent.policy import Policy
from gym_client.agent.residuals import MAX_WAITING, Residuals
from gym_client.agent.task_objects import TaskObjects
from gym_client.cli.announced import announced
from gym_client.hub import stream, transfers
from gym_client.hub.replies import parse_verdicts
from gym_client.hub.stream import Lease, WorkStream
from gym_client.hub.traffic import Traffic
from gym_client.hub.transfers import ObjectCache, download
from gym_client.ledger import copy as ledger_copy
from gym_client.ledger.copy import _heads, _with_room
from gym_client.mirror.source import Mirrors

from gym_fed.config.hub.mirrors import MirrorConfig
from gym_fed.config.hub.task import TrainingRecipe
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.heads import Head, SignedHead
from gym_fed.trust.wire.limits import CALL_SECONDS
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.agent_scene import Scene, empty
from tests.support.wait import until


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-9, 1e300])
def test_a_lease_of_any_duration_is_renewed_neither_in_a_busy_loop_nor_never(seconds: float) -> None:
    waits: list[float] = []

    def call(method: str, request: Any, seconds: float) -> pb.HeartbeatReply:
        waits.append(seconds)
        return pb.HeartbeatReply(lease_seconds=sent)

    sent = seconds
    lease = Lease("t", seconds)
    assert 1 <= lease.seconds <= 3600
    lease.beat(SimpleNamespace(call=call))  # type: ignore[arg-type]
    lease.touch(SimpleNamespace(call=call))  # type: ignore[arg-type]
    assert 1 <= lease.seconds <= 3600
    assert all(0 < wait <= CALL_SECONDS for wait in waits)
    assert len(waits) == 2


class Flood:
    """A hub's stream of notices without end; it counts what was taken from it."""

    def __init__(self) -> None:
        self.taken, self.is_cancelled = 0, False

    def __iter__(self) -> Iterator[pb.WorkEvent]:
        while not self.is_cancelled and self.taken < 100_000:
            self.taken += 1
            yield pb.WorkEvent(notice=pb.Notice(message="x"))

    def cancel(self) -> None:
        self.is_cancelled = True


def test_notices_without_end_wait_at_the_hub_while_nobody_reads_them() -> None:
    flood = Flood()
    client = SimpleNamespace(
        stream=lambda *_: flood, errors=lambda: closing(SimpleNamespace(close=lambda: None))
    )
    with WorkStream(client) as events:  # type: ignore[arg-type]
        until(lambda: flood.taken > stream._MAX_WAITING)
        assert events.next(1.0) is not None
        until(lambda: flood.taken > stream._MAX_WAITING + 1)
        assert flood.taken == stream._MAX_WAITING + 2


def test_objects_of_a_task_that_fails_or_is_taken_back_leave_the_disk(scene: Scene) -> None:
    content = RecordDict({"model": ArrayRecord({"w": _array()})})
    scene.hub.give(scene.task("failing", content))
    scene.hub.give(scene.task("lost", content))
    scene.hub.finish()

    def work(message: Any, context: Any) -> RecordDict:
        assert any(scene.home.objects.iterdir())
        raise GymError(ErrorCode.INTERNAL if not scene.hub.submitted else ErrorCode.LEASE_LOST, "no")

    scene.agent(work).run()
    assert set(scene.hub.submitted) == {"failing"}
    assert not list(scene.home.objects.iterdir())


def test_an_object_that_claims_to_be_a_soup_is_kept_only_if_the_task_names_it(scene: Scene) -> None:
    task = scene.task("t", RecordDict({"model": ArrayRecord({"w": _array()})}))
    task.content.arrays["model"].arrays[0].stype = "gym.delta.v1"
    scene.hub.give(task)
    scene.hub.finish()
    scene.agent(empty).run()
    assert not list(scene.home.objects.iterdir())


def test_a_task_deletes_no_soup_of_another_hub_and_a_new_lineage_replaces_its_old_one(scene: Scene) -> None:
    objects = TaskObjects(scene.home, scene.client, Policy(), Traffic(scene.home, scene.client.pin.server))
    hooks = Hooks(lambda *_: None, lambda: False, time.time)
    first, second = objects.cache.put(b"first"), objects.cache.put(b"second")

    def fetch(task: Any, server: str, *soups: Path) -> None:
        named = [SimpleNamespace(sha256=path.name, integers=None) for path in soups]
        spec: Any = SimpleNamespace(server="s" + server * 16, soups=named)
        objects.fetch(task, spec, hooks, lambda action: action())

    fetch(scene.task("1"), "a", first)
    others = scene.task("2", RecordDict({"model": ArrayRecord({"w": _array()})}))
    others.content.arrays["model"].arrays[0].sha256 = first.name
    assert first not in objects.temporary_files(others, None)
    fetch(scene.task("2"), "b", second)
    fetch(scene.task("3"), "b", first)
    assert (first.exists(), second.exists()) == (True, False)
    fetch(scene.task("4"), "a")
    assert first.exists()  # the other hub's version has it, too
    KeptSoups(scene.home).replace("s" + "b" * 16, ())
    assert not first.exists()


def test_sums_of_tasks_that_a_hub_takes_back_leave_the_disk(scene: Scene) -> None:
    objects = TaskObjects(scene.home, scene.client, Policy(), Traffic(scene.home, scene.client.pin.server))
    server = "s" + "a" * 16

    def fetch(number: int, should_stop: Callable[[], bool]) -> None:
        data = bytes([number]) * 2_000_000
        scene.hub.objects[name := hashlib.sha256(data).hexdigest()] = data
        digest = f"sha256:{number:032x}{number:032x}"
        soup = {"sha256": "1" * 64, "sum_sha256": name, "sum_bytes": len(data), "integers": digest}
        early = {**soup, "sha256": "2" * 64, "version_digest": "sha256:" + "e" * 64}
        soups = [SimpleNamespace(**early), SimpleNamespace(**soup, version_digest=digest)]
        spec: Any = SimpleNamespace(server=server, soups=soups, base_digest="sha256:" + "b" * 64)
        task = scene.task(str(number))
        objects.fetch(task, spec, Hooks(lambda *_: None, should_stop, time.time), lambda action: action())

    for number in range(1, 4):
        fetch(number, lambda: False)
    assert len(list(scene.home.versions(server).iterdir())) == 1
    for number in range(4, 7):
        with pytest.raises(GymError, match="was stopped"):
            fetch(number, lambda: True)
    assert len(list(scene.home.objects.glob("*.part"))) <= 1


def test_residuals_of_updates_that_a_hub_never_judges_are_those_of_the_newest(scene: Scene) -> None:
    residuals = Residuals(scene.home, scene.client.pin.server)
    sent = [f"{number:064x}" for number in range(MAX_WAITING + 3)]
    dropped: list[str] = []
    for number, update in enumerate(sent):
        for name in ("residual", "moments"):
            (file := scene.home.folder / name).write_bytes(b"1")
            os.utime(file, (number, number))
        dropped += residuals.stage(scene.home.folder / "residual", update, scene.home.folder / "moments")
    assert dropped == sent[:3]
    for suffix in (".staged", ".moments"):
        kept = sorted(path.stem for path in residuals.folder.glob(f"*{suffix}"))
        assert kept == sent[3:]
    assert residuals.staged() == sent  # a verdict on any of them is still settled
    assert residuals.settle([{"update": sent[0], "verdict": "merged", "server_round": 1}]) == {
        sent[0]: "merged"
    }


def _array() -> Any:
    return Array(np.arange(1000, dtype=np.float32))


def test_a_large_object_that_would_fill_the_disk_is_refused_before_a_byte(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"x" * 1000
    scene.hub.objects[name := hashlib.sha256(data).hexdigest()] = data
    monkeypatch.setattr(transfers, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=transfers.SPARE_BYTES + 999))
    with pytest.raises(GymError, match="must stay free") as caught:
        download(scene.client, ObjectCache(tmp_path), name, len(data))
    assert caught.value.code is ErrorCode.DISK_FULL
    assert not scene.hub.download_offsets


def test_arrays_larger_than_half_of_the_free_memory_are_not_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_objects, "available_memory_bytes", lambda: 9_000)
    arrays = {name: Array(np.full(500, number, np.float32)) for number, name in enumerate("abc")}
    scene.hub.give(scene.task("large", RecordDict({"model": ArrayRecord(arrays)})))
    scene.hub.finish()
    scene.agent(lambda *_: pytest.fail("the app was called")).run()
    assert "half of the free memory" in scene.error_of("large").reason


def test_a_ledger_without_end_leaves_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def disk(_: Path) -> Any:
        return SimpleNamespace(free=transfers.SPARE_BYTES - (len(taken) > 1000))

    monkeypatch.setattr(shutil, "disk_usage", disk)
    endless = (str(taken.append(number)) for number in count())
    with pytest.raises(GymError, match="must stay free") as caught:
        append_lines(tmp_path / "ledger.jsonl", _with_room(endless, tmp_path))
    assert caught.value.code is ErrorCode.DISK_FULL
    assert len(taken) < 2000


def test_a_ledger_without_end_is_cut_off_on_a_disk_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_copy, "MAX_BYTES", 10_000)
    with pytest.raises(GymError, match=r"more than 10\.0 kB") as caught:
        append_lines(tmp_path / "ledger.jsonl", _with_room(("x" * 99 for _ in count()), tmp_path))
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert (tmp_path / "ledger.jsonl").stat().st_size <= 11_000


VERDICT = {"update": "ab" * 32, "server_round": 1, "verdict": "merged", "reason": "", "bytes": 1, "credit": 1}


def test_an_account_with_more_verdicts_or_entries_than_a_hub_sends_is_refused() -> None:
    assert len(parse_verdicts([json.dumps({**VERDICT, "entries": list(range(500))})] * 100)) == 100
    with pytest.raises(GymError, match="more than 100"):
        parse_verdicts([json.dumps(VERDICT)] * 101)
    with pytest.raises(GymError, match="more than 500 ledger entries"):
        parse_verdicts([json.dumps({**VERDICT, "entries": list(range(501))})])


@pytest.mark.parametrize("sizes", [[2, 2], [3, 2]])
def test_heads_without_end_are_refused_at_the_first_out_of_order(sizes: list[int]) -> None:
    key, sent = SigningKey.generate(), [0]

    def heads() -> Iterator[pb.LedgerHead]:
        for size in sizes * 1000:
            sent[0] += 1
            head = SignedHead.sign(key, Head("gym-head-1", "s" + "0" * 16, size, "ab" * 32, "cd" * 32, 1, 1))
            yield pb.LedgerHead(head_json=head.to_json())

    class Call:
        def __iter__(self) -> Iterator[pb.LedgerHead]:
            return heads()

        def cancel(self) -> None: ...

    client = SimpleNamespace(
        stream=lambda *_: Call(), errors=lambda: closing(SimpleNamespace(close=lambda: None))
    )
    with pytest.raises(GymError, match="out of order"):
        _heads(client, 1, 10)  # type: ignore[arg-type]
    assert sent[0] <= 2


def test_a_mirror_whose_host_no_name_can_be_costs_nothing_but_a_try() -> None:
    mirror = MirrorConfig(address="a..b:9443", fingerprint="sha256:" + "0" * 64)
    client = SimpleNamespace(address=None, pin=SimpleNamespace(fingerprint=""))
    mirrors = Mirrors.__new__(Mirrors)
    mirrors._client = client  # type: ignore[assignment]
    with pytest.raises(GymError, match="cannot be resolved"):
        mirrors._target(SimpleNamespace(config=mirror))  # type: ignore[arg-type]


def test_a_recipe_of_a_hundred_thousand_keys_is_refused_before_they_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingRecipe, "added_key", lambda name: pytest.fail("looked up"))
    many = {f"{number:x}": 1 for number in range(100_000)}
    with pytest.raises(GymError, match="100,000 keys"):
        announced(_status({"recipe": many, "codec": {}}))


def test_an_announced_recipe_with_errors_without_end_is_a_short_message() -> None:
    modules = {"lora": {"target_modules": ["q"] * 100_000}}
    for recipe in (modules, {"lora": {f"{number:x}": 1 for number in range(10_000)}}):
        with pytest.raises(GymError) as caught:
            announced(_status({"recipe": recipe, "codec": {}}))
        assert caught.value.code is ErrorCode.POLICY_REFUSED
        assert len(caught.value.message) <= 2000


def _status(document: dict[str, Any]) -> pb.StatusReply:
    return pb.StatusReply(recipe_json=json.dumps(document, separators=(",", ":")))
