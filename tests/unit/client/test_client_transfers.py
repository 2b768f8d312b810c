"""Calls, sessions, uploads and downloads over real gRPC with TLS, with the line breaking where it hurts."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.cli.join import enter
from gym_client.hub.traffic import Rates
from gym_client.hub.transfers import ObjectCache, download, upload
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.tiny_hub import TinyHub

MIB = 1 << 20


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TinyHub]:
    hub = TinyHub(tmp_path / "hub").start()
    yield hub
    hub.stop()


@pytest.fixture
def client(tmp_path: Path, hub: TinyHub) -> Iterator[HubClient]:
    home, address = Home.open(tmp_path / "home"), Address.parse(hub.address)
    with HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False)) as client:
        enter(client, "me", "")
        yield client


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    (tmp_path / "objects").mkdir()
    return ObjectCache(tmp_path / "objects")


def code_of(function: Any, *arguments: Any) -> ErrorCode:
    with pytest.raises(GymError) as caught:
        function(*arguments)
    return caught.value.code


def stored(hub: TinyHub, data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    hub.objects[name] = data
    return name


def test_a_refusal_arrives_as_the_error_that_the_hub_raised(hub: TinyHub, client: HubClient) -> None:
    def refuse(method: str, request: Any) -> None:
        if method == "Account":
            raise GymError(ErrorCode.STALE, "round 3 is over", "wait")

    hub.hook = refuse
    with pytest.raises(GymError) as caught:
        client.call("Account", pb.AccountRequest())
    assert (caught.value.code, caught.value.message, caught.value.hint) == (
        ErrorCode.STALE,
        "round 3 is over",
        "wait",
    )


def test_a_hub_that_is_gone_is_unavailable(hub: TinyHub, client: HubClient) -> None:
    hub.stop()
    assert code_of(client.call, "Account", pb.AccountRequest()) is ErrorCode.UNAVAILABLE
    hub.start()


def test_a_lost_session_is_renewed_without_a_word(hub: TinyHub, client: HubClient) -> None:
    client.call("Account", pb.AccountRequest())
    hub.sessions.clear()
    assert client.call("Account", pb.AccountRequest()).balance == 3


def test_a_contributor_that_the_hub_has_forgotten_gets_one_message(hub: TinyHub, client: HubClient) -> None:
    hub.sessions.clear()
    hub.enrolled.clear()
    assert code_of(client.call, "Account", pb.AccountRequest()) is ErrorCode.UNAUTHENTICATED
    enter(client, "me", "")
    assert client.call("Account", pb.AccountRequest()).balance == 3


def test_an_upload_goes_on_where_the_line_broke(hub: TinyHub, client: HubClient, tmp_path: Path) -> None:
    data = secrets.token_bytes(5 * MIB + 17)
    path, name = tmp_path / "delta", hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    hub.break_upload_after = 2 * MIB
    assert code_of(upload, client, name, path) is ErrorCode.UNAVAILABLE
    held = len(hub.parts[name])
    assert 2 * MIB <= held < len(data)
    offsets: list[int] = []
    upload(client, name, path, lambda done, total: offsets.append(done))
    assert offsets[0] == held
    assert offsets[-1] == len(data)
    assert hub.objects[name] == data


def test_an_object_that_the_hub_has_is_not_sent_again(
    hub: TinyHub, client: HubClient, tmp_path: Path
) -> None:
    (tmp_path / "delta").write_bytes(b"abc")
    name = stored(hub, b"abc")
    upload(client, name, tmp_path / "delta")
    assert name not in hub.parts


def test_an_upload_that_is_stopped_leaves_what_it_sent(
    hub: TinyHub, client: HubClient, tmp_path: Path
) -> None:
    data = secrets.token_bytes(4 * MIB)
    path, name = tmp_path / "delta", hashlib.sha256(data).hexdigest()
    path.write_bytes(data)
    sent: list[int] = []
    stop = lambda: bool(sent) and sent[-1] >= MIB  # noqa: E731
    assert (
        code_of(upload, client, name, path, lambda done, total: sent.append(done), stop)
        is ErrorCode.INTERRUPTED
    )
    assert 0 < len(hub.parts[name]) < len(data)


def test_a_download_goes_on_where_the_line_broke(hub: TinyHub, client: HubClient, cache: ObjectCache) -> None:
    data = secrets.token_bytes(50_500)
    name = stored(hub, data)
    hub.break_download_after = 20_000
    assert code_of(download, client, cache, name, len(data)) is ErrorCode.UNAVAILABLE
    assert not cache.has(name, len(data))
    assert download(client, cache, name, len(data)).read_bytes() == data
    assert 0 < hub.download_offsets[1] <= 20_000
    download(client, cache, name, len(data))
    assert len(hub.download_offsets) == 2


def test_bytes_with_another_hash_are_dropped(hub: TinyHub, client: HubClient, cache: ObjectCache) -> None:
    name = stored(hub, b"a" * 5000)
    hub.serve = lambda data: b"b" * len(data)
    assert code_of(download, client, cache, name, 5000) is ErrorCode.HASH_MISMATCH
    assert list(cache.folder.iterdir()) == []


def test_what_a_broken_download_left_is_hashed_too(
    hub: TinyHub, client: HubClient, cache: ObjectCache
) -> None:
    data = secrets.token_bytes(5000)
    name = stored(hub, data)
    part = cache.folder / f"{name}.part"
    part.write_bytes(data[:1999] + b"?")
    assert code_of(download, client, cache, name, 5000) is ErrorCode.HASH_MISMATCH
    assert hub.download_offsets == [2000]
    assert list(cache.folder.iterdir()) == []
    part.write_bytes(data[:2000])
    assert download(client, cache, name, 5000).read_bytes() == data


def test_not_a_byte_more_than_announced_is_taken(hub: TinyHub, client: HubClient, cache: ObjectCache) -> None:
    name = stored(hub, b"a" * 5000)
    hub.serve = lambda data: data + b"b" * 10_000_000
    assert code_of(download, client, cache, name, 5000) is ErrorCode.TOO_LARGE
    hub.announced_size = lambda size: 5000
    assert code_of(download, client, cache, name, 5000) is ErrorCode.TOO_LARGE
    assert list(cache.folder.iterdir()) == []


def test_a_name_that_is_no_sha256_never_becomes_a_path(client: HubClient, cache: ObjectCache) -> None:
    assert code_of(download, client, cache, "../../key.pem", 5) is ErrorCode.USAGE


class Stuck:
    """A hub that answers every call, and whose upload never gets further."""

    address = "hub.example:1"

    def __init__(self, offset: int, after: int) -> None:
        self.calls, self.offset, self.after = 0, offset, after
        self.rates = Rates()

    def call(self, name: str, request: object, seconds: float = 0.0) -> pb.UploadState:
        self.calls += 1
        assert self.calls < 10, "the upload goes on and on"
        return pb.UploadState(offset=self.offset if name == "BeginUpload" else self.after, complete=False)


@pytest.mark.parametrize(("offset", "after"), [(0, 0), (40, 40), (40, 10)], ids=["none", "same", "less"])
def test_an_upload_of_which_the_hub_takes_nothing_ends(tmp_path: Path, offset: int, after: int) -> None:
    path = tmp_path / "delta"
    path.write_bytes(bytes(100))
    hub: Any = Stuck(offset, after)
    with pytest.raises(GymError, match=f"took none of {100 - offset} bytes .* at {offset}") as caught:
        upload(hub, "a" * 64, path)
    assert caught.value.code is ErrorCode.INTERNAL
    assert hub.calls == 2
