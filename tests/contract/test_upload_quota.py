"""The quota on bytes that one account uploads and that are never merged."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.hub.transfers import upload
from gym_client.hub.transport import HubClient
from gym_server.backup.gc import gc
from gym_server.store.rights import FORMERLY, give_up, usage_of
from gym_server.store.tables import objects, readers, updates
from gym_server.store.usage import needed

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor
from tests.support.loopback_hub import LoopbackHub, some_delta, task_of_open_round, update_of
from tests.support.postgres import database_url
from tests.support.quick import quick

QUOTA = 1 << 20


@pytest.fixture(params=quick(["sqlite", "postgresql"], "sqlite"))
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackHub]:
    limits = {"unreferenced_bytes_per_account": QUOTA}
    found = LoopbackHub(tmp_path / "hub", limits=limits, storage={"database": database_url(request)})
    yield found
    found.close()


def bring(client: HubClient, folder: Path, size: int, fill: int) -> str:
    path = folder / f"{fill}.bin"
    path.write_bytes(bytes([fill]) * size)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    upload(client, sha256, path)
    return sha256


def test_uploads_that_nothing_names_end_at_the_quota_and_the_refusal_names_the_figures(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    with hub.client(tmp_path / "ann") as ann, hub.client(tmp_path / "bob") as bob:
        for fill in range(2):
            bring(ann, tmp_path, QUOTA // 2, fill)
        with pytest.raises(GymError, match=rf"{QUOTA:,} bytes of uploads .*; 1 more would exceed") as caught:
            bring(ann, tmp_path, 1, 2)
        assert caught.value.code is ErrorCode.QUOTA_EXCEEDED
        assert not list(hub.fed.store.staging.glob("*.part")), "nothing was taken of what was refused"
        bring(bob, tmp_path, QUOTA, 3)  # another account has its own share


def test_what_is_declared_and_not_sent_counts_as_if_it_were_there(hub: LoopbackHub, tmp_path: Path) -> None:
    with hub.client(tmp_path / "ann") as ann:
        request = pb.BeginUploadRequest(sha256="1" * 64, size_bytes=QUOTA)
        assert not ann.call("BeginUpload", request).complete
        assert not ann.call("BeginUpload", request).complete, "the same again is no second one"
        with pytest.raises(GymError, match=f"{QUOTA:,} bytes of unfinished uploads"):
            bring(ann, tmp_path, 1, 0)


def test_an_object_that_a_version_task_or_variant_names_is_not_charged(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    with hub.client(tmp_path / "ann") as ann:
        sha256 = bring(ann, tmp_path, QUOTA, 0)
        with hub.fed.database.transaction() as tx:
            assert usage_of(tx, ann.pin.contributor).finished == QUOTA
            tx.execute(readers.insert().values(sha256=sha256, contributor="*"))  # as a task does
            assert usage_of(tx, ann.pin.contributor).total == 0
        bring(ann, tmp_path, QUOTA, 1)


def test_giving_up_the_right_to_read_does_not_give_back_the_share(hub: LoopbackHub, tmp_path: Path) -> None:
    """Or replaced variants would fill the disk one after the other."""
    with hub.client(tmp_path / "ann") as ann:
        sha256 = bring(ann, tmp_path, QUOTA, 0)
        with hub.fed.database.transaction() as tx:
            give_up(tx, ann.pin.contributor, sha256)
            give_up(tx, ann.pin.contributor, sha256)
            rows = tx.execute(readers.select().where(readers.c.sha256 == sha256)).all()
            assert [row.contributor for row in rows] == [FORMERLY + ann.pin.contributor]
            assert usage_of(tx, ann.pin.contributor).finished == QUOTA
            assert sha256 not in needed(tx, time.time()), "gc may delete it"
        with pytest.raises(GymError, match="no object"):
            _read(ann, sha256)


def test_a_refused_update_counts_against_the_quota_and_its_file_goes_after_the_stated_time(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    raw = RawContributor(hub.address).enrol()
    who, delta = raw.key.contributor, bytes(QUOTA)
    task = task_of_open_round(hub, raw.session)
    raw.upload(delta)
    manifest = update_of(hub, who, task, delta)
    assert raw.submit(task, manifest)["verdict"] == "refused"
    with pytest.raises(GymError, match=f"{QUOTA:,} bytes of uploads that no merged update") as caught:
        raw.upload(b"another one")
    assert (caught.value.code, "deleted after 24 h 0 min" in caught.value.hint) == (
        ErrorCode.QUOTA_EXCEEDED,
        True,
    )
    assert gc(hub.fed.state, hub.fed.config)["objects"] == 0, "it is young"
    with hub.fed.database.transaction() as tx:
        tx.execute(objects.update().values(created_at=time.time() - 86400 - 10))
    assert gc(hub.fed.state, hub.fed.config)["object_bytes"] == QUOTA
    raw.upload(b"another one")
    raw.close()


def test_an_update_counts_until_it_is_merged(hub: LoopbackHub, tmp_path: Path) -> None:
    raw = RawContributor(hub.address).enrol()
    who, delta = raw.key.contributor, some_delta(tmp_path, 1).read_bytes()
    task = task_of_open_round(hub, raw.session)
    raw.upload(delta)
    assert raw.submit(task, update_of(hub, who, task, delta))["verdict"] == "admitted"
    raw.close()
    counts = {"admitted": len(delta), "rejected": len(delta), "aborted": len(delta), "merged": 0}
    for verdict, num_bytes in counts.items():
        with hub.fed.database.transaction() as tx:
            tx.execute(updates.update().values(verdict=verdict))
            assert usage_of(tx, who).finished == num_bytes, verdict


def test_nothing_larger_than_the_base_s_weights_can_need_is_taken(tmp_path: Path) -> None:
    hub = LoopbackHub(tmp_path / "hub")
    weights = 16 * 64 + 8 * 32
    most = (1 << 20) + 2 * 1024 + 8 * weights
    raw = RawContributor(hub.address).enrol()
    assert raw.status.max_update_bytes == most, "contributors are shown it before they join"
    raw.call(raw.stub.BeginUpload, pb.BeginUploadRequest(sha256="1" * 64, size_bytes=most))
    with pytest.raises(GymError, match=f"accepts 1 to {most}") as caught:
        raw.call(raw.stub.BeginUpload, pb.BeginUploadRequest(sha256="2" * 64, size_bytes=most + 1))
    assert caught.value.code is ErrorCode.TOO_LARGE
    raw.close()
    hub.close()


def _read(client: HubClient, sha256: str) -> None:
    with client.errors():
        list(client.stream("Download", pb.DownloadRequest(sha256=sha256), 10))
