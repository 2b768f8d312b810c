"""Objects on another file system than the hub's folder, where a rename fails with EXDEV."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_client.agent.residuals import Residuals
from gym_client.identity.home import Home
from gym_client.variants import push_variant, sign_variant
from gym_server.backup.gc import gc
from gym_server.store.objects import ObjectStore

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.objects import DeltaObjects
from gym_fed.training.run.checkpoints import copy_checkpoint
from tests.support.loopback_hub import LoopbackHub, manifest_of, some_delta


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than ``tmp_path``."""
    device = tmp_path.stat().st_dev
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    other = next((place for place in places if place.is_dir() and place.stat().st_dev != device), None)
    if other is None:
        pytest.skip("this machine has no second file system")
    folder = Path(tempfile.mkdtemp(dir=other))
    yield folder
    shutil.rmtree(folder)


def test_what_is_uploaded_and_what_the_hub_writes_itself_comes_to_another_disk(
    tmp_path: Path, other_disk: Path
) -> None:
    hub = LoopbackHub(tmp_path / "hub", storage={"objects": str(other_disk / "objects")})
    with hub.client(tmp_path / "ann") as ann:
        delta = some_delta(tmp_path, 1)
        push_variant(ann, delta, sign_variant(ann, manifest_of(delta)))
        sha256 = hashlib.sha256(delta.read_bytes()).hexdigest()
    written = hub.fed.store.put_file(some_delta(tmp_path, 2)), hub.fed.store.put_bytes(b"small")
    for name in (sha256, *written):
        path = hub.fed.store.local_path(name)
        assert path.is_relative_to(other_disk)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == name
    assert hub.fed.store.local_path(sha256).stat().st_mode & 0o777 == 0o600, "as private as the part was"
    assert not list(hub.fed.store.staging.iterdir())
    hub.close()


def test_a_copy_that_a_kill_cut_short_is_no_object_and_is_deleted_when_it_is_old(
    tmp_path: Path, other_disk: Path
) -> None:
    hub = LoopbackHub(tmp_path / "hub", storage={"objects": str(other_disk / "objects")})
    left = other_disk / "objects" / "ab" / f".{'ab' * 32}.0123456789abcdef.partial"
    left.parent.mkdir()
    left.write_bytes(bytes(100))
    assert not hub.fed.store.listed()
    assert gc(hub.fed.state, hub.fed.config)["staging"] == 0
    old = time.time() - 2 * 86400
    os.utime(left, (old, old))
    assert gc(hub.fed.state, hub.fed.config)["staging"] == 1
    assert not left.exists()
    hub.close()


def test_wrong_bytes_come_to_no_disk(tmp_path: Path, other_disk: Path) -> None:
    store = ObjectStore(str(other_disk), tmp_path / "staging")
    part = store.part_path("ann", "0" * 64)
    part.write_bytes(b"other bytes")
    with pytest.raises(GymError) as caught:
        store.adopt(part, "0" * 64)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert not [path for path in other_disk.rglob("*") if path.is_file()]


def test_other_stores_whose_folder_is_a_link_to_another_disk_take_files_too(
    tmp_path: Path, other_disk: Path
) -> None:
    variants, home, run = (tmp_path / name for name in ("variants", "home", "run"))
    for name in ("objects", "residuals", "checkpoints"):
        (other_disk / name).mkdir(0o700)
    for folder, name in ((variants, "objects"), (run, "checkpoints")):
        folder.mkdir()
        (folder / name).symlink_to(other_disk / name)
    objects = DeltaObjects(variants)
    with objects.staged(some_delta(tmp_path, 1)) as staged:
        objects.adopt(staged)
    objects.verify(staged.sha256)
    residual = tmp_path / "residual"
    residual.write_bytes(b"a residual")
    residuals = Residuals(Home.open(home), "s" + "0" * 16)
    shutil.rmtree(residuals.folder)
    residuals.folder.symlink_to(other_disk / "residuals")
    residuals.stage(residual, "update")
    assert [path.read_bytes() for path in (other_disk / "residuals").iterdir()] == [b"a residual"]
    named = tmp_path / "checkpoint-3"
    named.mkdir()
    (named / "state.json").write_text("{}")
    copy = copy_checkpoint(named, run / "checkpoints")
    assert [path.name for path in copy.iterdir()] == ["state.json"]
