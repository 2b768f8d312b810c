"""Calls, sessions, uploads and downloads over real gRPC with TLS, with the line breaking where it hurts."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.cli.join import enter
from gym_client.hub.stream import WorkStream
from gym_client.hub.traffic import DownloadPace, Rates, TokenBucket
from gym_client.hub.transfers import ObjectCache, download, upload
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.agent_scene import Scene
from tests.support.tiny_hub import TinyHub
from tests.support.wait import SECONDS
from tests.unit.client.test_client_waiting import Clock

MIB = 1 << 20


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


def test_a_work_stream_logs_in_again_where_its_session_has_ended(hub: TinyHub, client: HubClient) -> None:
    client.authenticate()
    hub.sessions.clear()
    hub.events.put(pb.WorkEvent(keep_alive=pb.KeepAlive()))
    with WorkStream(client) as stream:
        assert isinstance(stream.next(SECONDS), pb.WorkEvent)


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
    with pytest.raises(GymError, match=f"accepted none of {100 - offset} bytes .* at {offset}") as caught:
        upload(hub, "a" * 64, path)
    assert caught.value.code is ErrorCode.INTERNAL
    assert hub.calls == 2


class Sleeper(Clock):
    """Time that passes by sleeping alone."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bucket_lets_a_second_through_at_once_and_then_its_rate() -> None:
    clock = Sleeper()
    bucket = TokenBucket(1000, clock, clock.sleep)
    bucket.take(1000)
    assert clock.now == 100.0
    for _ in range(10):
        bucket.take(500)
    assert clock.now == pytest.approx(105.0, abs=0.01)
    clock.now += 60  # what is saved up in a pause is a second's worth
    bucket.take(3000)
    assert clock.now == pytest.approx(167.0, abs=0.01)


def test_a_bucket_without_a_rate_never_waits_and_one_that_stops_does_not_either() -> None:
    clock = Sleeper()
    TokenBucket(None, clock, clock.sleep).take(1 << 40)
    TokenBucket(1, clock, clock.sleep).take(1 << 40, should_stop=lambda: True)
    assert clock.now == 100.0


def test_uploads_and_downloads_keep_to_their_rates(scene: Scene) -> None:
    clock = Sleeper()
    scene.client.rates.up = TokenBucket(10_000, clock, clock.sleep)
    scene.client.rates.down = TokenBucket(20_000, clock, clock.sleep)
    data = bytes(range(256)) * 900  # 230,400 bytes
    cache = ObjectCache(scene.home.objects)
    sha256 = hashlib.sha256(data).hexdigest()
    upload(scene.client, sha256, cache.put(data))
    assert clock.now == pytest.approx(100 + 220_400 / 10_000, abs=0.1)
    assert scene.hub.objects[sha256] == data
    before = clock.now
    cache.path(sha256).unlink()
    download(scene.client, cache, sha256, len(data))
    assert clock.now - before == pytest.approx(210_400 / 20_000, abs=0.1)


def test_bandwidth_is_measured_remembered_and_never_above_the_limit(tmp_path: Path) -> None:
    home, clock = Home.open(tmp_path / "home"), Clock()
    pace = DownloadPace(home, clock=clock)
    assert pace.bandwidth() is None
    assert "unknown" in pace.duration(10**9)
    pace.note(0)
    clock.now += 2
    pace.note(4_000_000)
    pace.save()
    assert pace.duration(10**9) == "about 8 min at 2.0 MB/s (just measured)"
    again = DownloadPace(home)
    assert again.duration(60_000_000) == "about 30 s at 2.0 MB/s (measured at the last download)"
    limited = DownloadPace(home, limit=1_000_000)
    assert limited.duration(60_000_000) == "about 60 s at 1.0 MB/s (the maximum in policy.yaml)"
