"""Unreferenced files are deleted by the running hub and by `gym-server gc`; a full disk loses nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.hub.transfers import upload
from gym_client.variants import push_variant, remove_variant, sign_variant
from gym_server.backup.backup import care_lock
from gym_server.backup.gc import _delete, gc, gc_pass
from gym_server.clock import HubClock
from gym_server.rounds.round_store import MERGING
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.store.tables import objects, rounds, uploads
from sqlalchemy import select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.identity.variant import VariantManifest
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor
from tests.support.hub import HubProcess
from tests.support.judged_rounds import DENSE, Judged
from tests.support.loopback_hub import (
    LoopbackHub,
    manifest_of,
    some_delta,
    task_of_open_round,
    update_of,
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    found = LoopbackHub(tmp_path / "hub")
    yield found
    found.close()


def age(hub: LoopbackHub) -> None:
    """Everything in the store becomes two days old."""
    old = time.time() - 2 * 86400
    for path in [*(hub.fed.folder / "objects").rglob("*"), *hub.fed.store.staging.iterdir()]:
        os.utime(path, (old, old))
    with hub.fed.database.transaction() as tx:
        tx.execute(objects.update().values(created_at=old))


def test_only_what_nothing_names_is_deleted_and_only_when_it_is_old(hub: LoopbackHub, tmp_path: Path) -> None:
    client = hub.client(tmp_path / "ann")
    kept, dropped, orphan = (some_delta(tmp_path, seed) for seed in (1, 2, 3))
    for path, name in ((kept, "kept"), (dropped, "dropped")):
        push_variant(client, path, sign_variant(client, manifest_of(path, name=name)))
    remove_variant(client, "dropped")
    upload(client, manifest_of(orphan).delta_sha256, orphan, lambda done, total: None, lambda: False)
    staging = hub.fed.store.staging
    for name in ("nobody-" + "0" * 64 + ".part", "a.copy", "soup-7.gymdelta"):
        (staging / name).write_bytes(b"left")
    (staging / "replay-x").mkdir()
    (staging / "replay-x" / "soup.gymdelta").write_bytes(b"left")
    (staging / "something else").write_bytes(b"stays")
    assert (
        gc(hub.fed.state, hub.fed.config, 86400)["objects"]
        == gc(hub.fed.state, hub.fed.config, 86400)["staging"]
        == 0
    ), "all of it is young"
    age(hub)
    would = gc(hub.fed.state, hub.fed.config, 86400, dry_run=True)
    assert (would["objects"], would["staging"], would["kept"]) == (2, 4, 1)
    assert hub.fed.store.has(manifest_of(orphan).delta_sha256), "nothing was deleted yet"
    found = gc(hub.fed.state, hub.fed.config, 86400)
    assert (found["objects"], found["staging"], found["kept"]) == (2, 4, 1)
    assert found["object_bytes"] == dropped.stat().st_size + orphan.stat().st_size
    assert [hub.fed.store.has(manifest_of(path).delta_sha256) for path in (kept, dropped, orphan)] == [
        True,
        False,
        False,
    ]
    assert [path.name for path in staging.iterdir()] == ["something else"]
    upload(client, manifest_of(orphan).delta_sha256, orphan, lambda done, total: None, lambda: False)
    assert hub.fed.store.has(manifest_of(orphan).delta_sha256), "and it can be sent again"
    client.close()


def test_a_young_object_without_a_row_stays_and_so_does_what_came_to_be_named_meanwhile(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    young = hub.fed.store.put_bytes(b"a soup whose version is not committed yet")
    assert gc(hub.fed.state, hub.fed.config, 86400)["objects"] == 0
    assert hub.fed.store.has(young)
    age(hub)
    with hub.client(tmp_path / "ann") as client:
        kept = some_delta(tmp_path, 1)
        push_variant(client, kept, sign_variant(client, manifest_of(kept)))
    age(hub)
    named = manifest_of(kept).delta_sha256
    assert _delete(
        hub.fed.state,
        hub.fed.config,
        [named, young],
        time.time() - 86400,
        hub.fed.store.listed(),
    ) == [young]
    assert (hub.fed.store.has(named), hub.fed.store.has(young)) == (True, False)


def test_an_object_that_gc_deletes_while_a_variant_of_it_is_checked_is_asked_for_again(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that is kept has its file, whatever runs beside."""
    path, checks = some_delta(tmp_path, 1), hub.fed.variants.checks
    look, runs = checks.check_file, []

    def look_and_lose(manifest: VariantManifest) -> None:
        look(manifest)
        if not runs:
            age(hub)
            runs.append(gc(hub.fed.state, hub.fed.config, 86400)["objects"])

    monkeypatch.setattr(checks, "check_file", look_and_lose)
    with hub.client(tmp_path / "ann") as client:
        sha256 = manifest_of(path).delta_sha256
        upload(client, sha256, path, lambda done, total: None, lambda: False)
        signed = sign_variant(client, manifest_of(path))
        request = pb.PutVariantRequest(variant_json=signed.to_json())
        assert client.call("PutVariant", request).needs_object
        assert runs == [1]
        push_variant(client, path, signed)
    assert hub.fed.store.has(sha256)


def test_an_update_whose_object_gc_deletes_while_it_is_checked_is_not_admitted_before_it_is_sent_again(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, admission = RawContributor(hub.address).enrol(), hub.fed.admission
    delta = some_delta(tmp_path, 1).read_bytes()
    task = task_of_open_round(hub, raw.session)
    manifest = update_of(hub, raw.key.contributor, task, delta)
    raw.upload(delta)
    look, runs = admission._inspect, []

    def look_and_lose(found: UpdateManifest) -> float | None:
        norm = look(found)
        if not runs:
            age(hub)
            runs.append(gc(hub.fed.state, hub.fed.config, 86400)["objects"])
        return norm

    monkeypatch.setattr(admission, "_inspect", look_and_lose)
    with pytest.raises(GymError) as caught:
        raw.submit(task, manifest)
    assert (caught.value.code, runs) == (ErrorCode.NOT_FOUND, [1])
    raw.upload(delta)
    assert raw.submit(task, manifest)["verdict"] == "admitted"
    assert hub.fed.store.has(manifest.delta_sha256)
    raw.close()


def test_a_plain_reply_whose_object_gc_deletes_while_it_is_checked_is_not_accepted(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = RawContributor(hub.address).enrol()
    data = bytes(4096)
    raw.upload(data)
    session = hub.fed.accounts.session(raw.session)
    reply = pb.SubmitRequest(message_id=task_of_open_round(hub, raw.session))
    shape, sha256 = [len(data) // 4 - 32], hashlib.sha256(data).hexdigest()
    array = pb.ArrayRef(
        name="w", dtype="float32", shape=shape, stype="numpy.ndarray", sha256=sha256, size_bytes=len(data)
    )
    reply.content.arrays["arrays"].arrays.append(array)
    reply.content.order.append("arrays")
    service = Hub(hub.fed, Wakeups())
    look, runs = service._transfers.check_present, []

    def look_and_lose(contributor: str, records: pb.Records) -> None:
        look(contributor, records)
        if not runs:
            age(hub)
            runs.append(gc(hub.fed.state, hub.fed.config, 86400)["objects"])

    monkeypatch.setattr(service._transfers, "check_present", look_and_lose)
    with pytest.raises(GymError) as caught:
        service._submit(session.contributor, session.node_id, reply)
    assert (caught.value.code, runs) == (ErrorCode.NOT_FOUND, [1])
    raw.upload(data)
    assert "received" in service._submit(session.contributor, session.node_id, reply)
    raw.close()


def test_gc_lets_others_write_between_two_deletions_on_a_remote_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = LoopbackHub(tmp_path / "hub", storage={"objects": f"memory://{tmp_path.name}"})
    stored = [hub.fed.store.put_bytes(bytes([fill])) for fill in range(3)]
    with hub.fed.database.transaction() as tx:
        for sha256 in stored:
            tx.execute(objects.insert().values(sha256=sha256, size_bytes=1, created_at=0.0))
    delete, commits, at = hub.fed.store.delete, [], []

    def recorded(sha256: str) -> None:
        at.append(len(commits))
        delete(sha256)

    hub.fed.database.after_commit.append(commits.append)
    monkeypatch.setattr(hub.fed.store, "delete", recorded)
    assert gc(hub.fed.state, hub.fed.config)["objects"] == 3
    assert at == [0, 1, 2]
    hub.close()


def test_a_clock_that_was_set_forward_ages_nothing_of_an_open_round(hub: LoopbackHub, tmp_path: Path) -> None:
    """The upload has come and is not submitted yet; the hub runs first, and is then stopped with its round open."""
    hub.fed.clock.start()
    raw = RawContributor(hub.address).enrol()
    task_of_open_round(hub, raw.session)
    uploaded = some_delta(tmp_path, 1).read_bytes()
    raw.upload(uploaded)
    raw.call(raw.stub.BeginUpload, pb.BeginUploadRequest(sha256="1" * 64, size_bytes=100))
    soup = hub.fed.store.put_bytes(b"a soup whose version is not committed yet")
    sha256 = hashlib.sha256(uploaded).hexdigest()
    raw.close()
    hub.fed.clock.wall = lambda: time.time() + 60 * 86400
    assert gc(hub.fed.state, hub.fed.config)["objects"] == 0
    stopped = HubClock(hub.fed.database, wall=lambda: time.time() + 60 * 86400)
    hub.fed.clock = stopped
    assert stopped.now() > time.time() + 59 * 86400
    assert gc(hub.fed.state, hub.fed.config)["objects"] == 0
    assert [hub.fed.store.has(name) for name in (sha256, soup)] == [True, True]
    with hub.fed.database.reading() as tx:
        assert tx.execute(select(uploads)).first() is not None, "the upload that has begun can go on"


def test_a_clock_that_was_set_back_does_not_age_what_is_written_after(hub: LoopbackHub) -> None:
    hub.fed.clock.start()
    hub.fed.clock.wall = lambda: time.time() - 60 * 86400
    soup = hub.fed.store.put_bytes(b"a soup whose version is not committed yet")
    then = time.time() - 60 * 86400
    os.utime(hub.fed.store.local_path(soup), (then, then))
    gc(hub.fed.state, hub.fed.config)
    assert hub.fed.store.has(soup)


def test_an_upload_that_stopped_is_withdrawn_and_its_part_deleted(hub: LoopbackHub, tmp_path: Path) -> None:
    raw = RawContributor(hub.address).enrol()
    for sha256 in ("1" * 64, "2" * 64):
        raw.call(raw.stub.BeginUpload, pb.BeginUploadRequest(sha256=sha256, size_bytes=100))
    raw.close()
    old = time.time() - 2 * 86400
    stopped, living = (hub.fed.store.part_path(raw.key.contributor, c * 64) for c in "12")
    os.utime(stopped, (old, old))
    with hub.fed.database.transaction() as tx:
        tx.execute(uploads.update().values(created_at=old))
    assert gc(hub.fed.state, hub.fed.config, dry_run=True)["staging"] == 1
    assert gc(hub.fed.state, hub.fed.config)["staging"] == 1
    assert [path.exists() for path in (stopped, living)] == [False, True]
    with hub.fed.database.reading() as tx:
        assert tx.scalars(select(uploads.c.sha256)).all() == ["2" * 64]


def test_a_pass_deletes_a_bounded_number_the_oldest_first_and_logs_what_was_freed(
    hub: LoopbackHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = [hub.fed.store.put_bytes(bytes([fill]) * 1000) for fill in range(3)]
    for days, sha256 in enumerate(stored, 2):
        then = time.time() - days * 86400
        os.utime(hub.fed.store.local_path(sha256), (then, then))
    assert gc(hub.fed.state, hub.fed.config, max_objects=1)["objects"] == 1
    assert [hub.fed.store.has(sha256) for sha256 in stored] == [True, True, False]
    with caplog.at_level(logging.INFO, "gym_server"):
        gc_pass(hub.fed.state, hub.fed.config)
        gc_pass(hub.fed.state, hub.fed.config)
    assert [record.getMessage() for record in caplog.records] == [
        "gc: freed 2.0 kB; deleted 2 objects, 0 temporary files and 0 evaluation records"
    ]


def test_a_running_hub_deletes_by_itself_what_nothing_needs(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "hub")
    orphan = hub.folder / "objects" / "ab" / ("ab" * 32)
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(bytes(1000))
    os.utime(orphan, (0, 0))
    hub.start()
    try:
        hub.wait_for("gc", lambda: not orphan.exists())
        hub.wait_for("its line in the log", lambda: "gc: freed 1.0 kB" in hub.log())
        assert "are deleted after" in hub.log()
    finally:
        hub.stop()


def test_gc_and_backup_wait_for_each_other(hub: LoopbackHub) -> None:
    with care_lock(hub.fed.folder), pytest.raises(GymError) as caught:
        gc(hub.fed.state, hub.fed.config)
    assert caught.value.code is ErrorCode.STATE_LOCKED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_hub_whose_disk_is_full_says_so_lives_and_goes_on_when_there_is_space(
    small_disk: Path, tmp_path: Path
) -> None:
    hub = LoopbackHub(small_disk / "hub", storage={"reserve_bytes": 0})
    ballast = small_disk / "ballast"
    try:
        ann = hub.client(tmp_path / "ann")
        path = some_delta(tmp_path, 1)
        push_variant(ann, path, sign_variant(ann, manifest_of(path, name="before")))
        acknowledged = hub.fed.ledger.newest_head()
        fill(ballast)
        second = some_delta(tmp_path, 2)
        signed = sign_variant(ann, manifest_of(second, name="while"))
        with pytest.raises(GymError) as caught:
            push_variant(ann, second, signed)
        assert caught.value.code is ErrorCode.DISK_FULL, caught.value
        with pytest.raises(GymError) as caught:
            hub.client(tmp_path / "bob")
        assert caught.value.code is ErrorCode.DISK_FULL, caught.value
        assert ann.status().ledger_head_json, "the hub lives"
        assert hub.fed.ledger.newest_head() == acknowledged
        ballast.unlink()
        push_variant(ann, second, signed)
        hub.client(tmp_path / "bob").close()
        assert hub.fed.ledger.verify()["variants"] == 2
        ann.close()
    finally:
        ballast.unlink(missing_ok=True)
        hub.close()


def test_a_merge_that_finds_the_disk_full_goes_on_when_there_is_space(
    small_disk: Path, tiny_base: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    hub = Judged(small_disk / "hub", tiny_base)
    ballast = small_disk / "ballast"
    try:
        number = hub.fed.round_store.open_next().server_round
        path = hub.encode(hub.trained("ann", steps=1), DENSE)
        update = hub.put(path, "ann", number, time.time(), 1)
        with hub.fed.database.transaction() as tx:
            row = rounds.update().where(rounds.c.server_round == number)
            tx.execute(row.values(state=MERGING, merging=json.dumps([update])))
        fill(ballast)
        with pytest.raises(OSError, match=r"(?i)no space"):
            hub.merge(number, [update])
        current = hub.fed.round_store.current()
        assert current is not None
        assert current.state == MERGING, "nothing that was acknowledged is lost"
        ballast.unlink()
        hub.merge(number, [update])
        assert hub.fed.round_store.num_committed() == 1
    finally:
        ballast.unlink(missing_ok=True)
        hub.close()


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
