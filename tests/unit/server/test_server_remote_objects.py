"""Local copies of a remote object store: whole, within a bound, and never removed under their readers."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import socket
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from gym_server.store import remote
from gym_server.store.objects import ObjectStore
from gym_server.store.unavailable import StoreUnavailable

from gym_fed.core import files
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.loopback_hub import LoopbackHub

BOUND = 3000


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0.0)
    yield ObjectStore(f"memory://{tmp_path.name}", tmp_path / "staging", max_copy_bytes=BOUND)
    fsspec.filesystem("memory").store.clear()


def copies(store: ObjectStore) -> set[str]:
    return {path.name.removesuffix(".copy") for path in store.staging.glob("*.copy")}


def put(store: ObjectStore, fill: int, age: float = 0.0) -> str:
    sha256 = store.put_bytes(bytes([fill]) * 1000)
    copy, then = store.staging / f"{sha256}.copy", time.time() - age
    os.utime(copy, (then, then))
    return sha256


def test_copies_beyond_the_bound_go_those_unused_for_longest_first(store: ObjectStore) -> None:
    oldest, older, newer = (put(store, fill, age) for fill, age in ((1, 30.0), (2, 20.0), (3, 10.0)))
    store.local_path(oldest)  # used now
    last = put(store, 4)
    assert copies(store) == {oldest, newer, last}
    assert store.local_path(older).read_bytes() == bytes([2]) * 1000, "it is fetched again"


def test_the_bound_of_copies_is_the_one_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0.0)
    bound = 1 << 20
    hub = LoopbackHub(
        tmp_path / "hub", storage={"objects": f"memory://{tmp_path.name}", "max_local_copy_bytes": bound}
    )
    try:
        for fill in range(4):
            hub.fed.store.put_bytes(bytes([fill]) * (bound // 2))
            time.sleep(0.02)
        assert sum(path.stat().st_size for path in hub.fed.store.staging.glob("*.copy")) == bound
    finally:
        hub.close()
        fsspec.filesystem("memory").store.clear()


def test_a_copy_that_is_mapped_or_open_stays_even_beyond_the_bound(store: ObjectStore) -> None:
    mapped, opened, free = (put(store, fill, 60.0 - fill) for fill in (1, 2, 3))
    with (
        open(store.staging / f"{mapped}.copy", "rb") as first,
        open(store.staging / f"{opened}.copy", "rb"),
        mmap.mmap(first.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        first.close()
        put(store, 4)
        five = put(store, 5)
        assert {mapped, opened} <= copies(store)
        assert free not in copies(store)
        assert data[:] == bytes([1]) * 1000
    six = put(store, 6)
    assert copies(store) == {opened, five, six}, "nobody has the oldest one open any more"


def test_a_copy_that_was_asked_for_just_now_stays_until_it_is_opened(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 300.0)
    asked = [store.local_path(put(store, fill, 600.0)) for fill in range(6)]
    assert [path.read_bytes()[0] for path in asked] == list(range(6))


def test_threads_that_fetch_one_object_at_once_all_get_it_whole(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 300.0)
    data = os.urandom(100_000)
    sha256 = store.put_bytes(data)
    (store.staging / f"{sha256}.copy").unlink(missing_ok=True)
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1000)  # so that they meet
    memory = type(fsspec.filesystem("memory"))  # whose own files share one position
    monkeypatch.setattr(memory, "open", lambda *_, **__: io.BytesIO(data))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: store.local_path(sha256).read_bytes(), range(8)))
    assert found == [data] * 8
    assert not list(store.staging.glob("*.fetch"))


def test_bytes_of_another_hash_are_not_used_and_nothing_of_them_stays(
    store: ObjectStore, tmp_path: Path
) -> None:
    sha256 = put(store, 1)
    (store.staging / f"{sha256}.copy").unlink()
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/{tmp_path.name}/{sha256[:2]}/{sha256}", b"something else")
    with pytest.raises(StoreUnavailable, match="has different bytes") as refusal:
        store.local_path(sha256)
    assert refusal.value.refusal.code is ErrorCode.HASH_MISMATCH
    assert not list(store.staging.iterdir())


def test_an_object_that_shows_only_after_a_while_is_found(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = put(store, 1)
    (store.staging / f"{sha256}.copy").unlink()
    file_system = type(fsspec.filesystem("memory"))
    info, hidden = file_system.info, [2]

    def late(self: Any, path: str, **options: Any) -> Any:
        if hidden[0]:
            hidden[0] -= 1
            raise FileNotFoundError(path)
        return info(self, path, **options)

    monkeypatch.setattr(file_system, "info", late)
    assert store.local_path(sha256).read_bytes() == bytes([1]) * 1000
    assert hidden == [0]


def test_an_upload_that_the_store_does_not_show_stays_on_this_machine(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = store.part_path("ann", hashlib.sha256(b"kept").hexdigest())
    part.write_bytes(b"kept")
    file_system = type(fsspec.filesystem("memory"))
    with monkeypatch.context() as patch:
        patch.setattr(file_system, "put_file", lambda *_, **__: None)
        with pytest.raises(StoreUnavailable, match="does not list an object that was just stored"):
            store.adopt(part, hashlib.sha256(b"kept").hexdigest())
    assert part.read_bytes() == b"kept"
    assert store.adopt(part, hashlib.sha256(b"kept").hexdigest()) == 4


def test_what_a_killed_process_left_of_a_fetch_goes_at_the_next_start(tmp_path: Path) -> None:
    left, going_on = tmp_path / "a.fetch", tmp_path / "b.fetch"
    for path in (left, going_on):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    ObjectStore("memory://left", tmp_path)
    assert not left.exists()
    assert going_on.exists(), "another command may be fetching it"


def test_credentials_in_a_url_are_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="contains credentials") as refusal:
        ObjectStore("s3://KEY:Grebe-2-Sorrel@bucket/hub".replace("KEY", "AKIA"), tmp_path)
    assert refusal.value.code is ErrorCode.CONFIG_INVALID
    assert "Grebe" not in f"{refusal.value} {refusal.value.hint}"


def test_a_url_that_nothing_reaches_is_refused_with_the_remedy_and_without_its_password(
    tmp_path: Path,
) -> None:
    secret = "Grebe-2-" + "Sorrel"
    with pytest.raises(GymError) as refusal:
        ObjectStore(f"nosuch://user:{secret}@host/objects", tmp_path)
    assert refusal.value.code is ErrorCode.CONFIG_INVALID
    assert secret not in "".join(traceback.format_exception(refusal.value))


def test_a_deletion_that_a_store_does_not_answer_ends_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(remote, "DELETE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never answers
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}"),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "key"),
            ("AWS_REGION", "eu"),
        ):
            monkeypatch.setenv(name, value)
        store = ObjectStore("s3://bucket/hub", tmp_path / "staging")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.delete("0" * 64)
        assert time.monotonic() - began < 60, "of the 300 s of other calls"
