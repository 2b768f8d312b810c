"""Objects on a real S3 server, which fails for a while, gives other bytes, or is gone."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from gym_server.backup.place import Place, object_name
from gym_server.store.objects import ObjectStore
from gym_server.store.unavailable import StoreUnavailable

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from tests.support import s3
from tests.support.federation import Federation

pytest.importorskip("obstore", reason="obstore is not installed (pip install 'gym-fed[s3]')")
pytestmark = pytest.mark.slow  # the S3 server is installed from PyPI the first time, which takes a minute

server = s3.server


@pytest.fixture
def proxy(server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.FailingProxy]:
    found = s3.FailingProxy(server.port)
    s3.use(found.url, monkeypatch)
    yield found
    found.close()


@pytest.fixture
def store(proxy: s3.FailingProxy, tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"s3://hub/{tmp_path.name}", tmp_path / "staging")


def test_objects_make_the_round_trip_small_and_in_several_parts(store: ObjectStore, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(13 << 20))
    digests = store.put_bytes(b"small"), store.put_file(large)
    assert {name: found.size_bytes for name, found in store.listed().items()} == {
        digests[0]: 5,
        digests[1]: 13 << 20,
    }
    for copy in store.staging.glob("*.copy"):
        copy.unlink()
    for digest in digests:
        assert store.has(digest)
        assert file_sha256(store.local_path(digest)) == digest
    store.delete(digests[0])
    assert not store.has(digests[0])
    with pytest.raises(GymError) as refusal:
        store.local_path(digests[0])
    assert refusal.value.code is ErrorCode.NOT_FOUND
    assert not list(store.staging.glob("*.fetch")), "temporaries are gone"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_a_store_that_answers_503_for_a_while_is_asked_again(
    store: ObjectStore, proxy: s3.FailingProxy, method: str
) -> None:
    proxy.methods = (method,)
    proxy.failing = 3
    digest = store.put_bytes(method.encode())
    (store.staging / f"{digest}.copy").unlink()
    assert store.local_path(digest).read_bytes() == method.encode()
    assert proxy.failing == 0


def test_a_store_that_goes_on_answering_503_is_away_and_asked_no_more(
    store: ObjectStore, proxy: s3.FailingProxy
) -> None:
    proxy.failing = 1000
    with pytest.raises(StoreUnavailable) as refusal:
        store.has("0" * 64)
    assert refusal.value.refusal.code is ErrorCode.UNAVAILABLE
    assert len(proxy.seen) == 6
    text = "".join(traceback.format_exception(refusal.value))
    assert s3.SECRET not in text
    assert s3.KEY_ID not in text


def test_bytes_that_are_not_those_that_were_put_are_not_used(
    store: ObjectStore, proxy: s3.FailingProxy
) -> None:
    digest = store.put_bytes(b"as it was put")
    (store.staging / f"{digest}.copy").unlink()
    proxy.spoil = True
    with pytest.raises(StoreUnavailable, match="has different bytes"):
        store.local_path(digest)
    assert not list(store.staging.iterdir())


def test_a_bucket_that_is_not_there_is_reported_at_the_first_object(
    proxy: s3.FailingProxy, tmp_path: Path
) -> None:
    store = ObjectStore("s3://nobody-made-it/objects", tmp_path / "staging")
    with pytest.raises(StoreUnavailable, match=r"nobody-made-it.*404 Not Found") as refusal:
        store.put_bytes(b"lost")
    assert "check the object store" in str(refusal.value.refusal.hint)


def test_a_federation_with_its_objects_on_s3_and_rows_in_postgresql_commits_its_rounds(
    proxy: s3.FailingProxy, tmp_path: Path, tiny_base: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgres").new_database()
    storage = {"database": url, "objects": f"s3://hub/{tmp_path.name}"}
    federation = Federation(tmp_path, tiny_base, storage=storage)
    try:
        federation.complete("ann", "bob")
        assert "PUT" in proxy.seen
        assert not list((federation.hub.folder / "objects").glob("*/*")), "nothing is on the local disk"
        assert s3.SECRET not in federation.hub.log()
    finally:
        federation.close()


def test_a_backups_place_on_s3_keeps_finds_checks_and_drops_files(
    proxy: s3.FailingProxy, tmp_path: Path
) -> None:
    place, file, name = Place(f"s3://hub/{tmp_path.name}"), tmp_path / "file", "ab" * 32
    file.write_bytes(b"an object" * 1000)
    assert (place.manifests(), place.objects()) == ({}, {})
    sha256, size = place.put(file, object_name(name))
    assert place.objects() == {name: size}
    place.check(object_name(name), sha256)
    place.get(object_name(name), tmp_path / "again", sha256)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    place.put(file, "snapshots/unfinished/database")
    assert place.drop_unfinished() == 1
    place.drop_objects({name})
    assert place.objects() == {}
