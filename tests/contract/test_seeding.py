"""Contributors fetch public objects from each other over gRPC with TLS; whatever a seeder does, the hub delivers."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from gym_client.agent.hooks import Hooks
from gym_client.agent.policy import Policy
from gym_client.agent.task_objects import TaskObjects
from gym_client.hub.traffic import Traffic
from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.identity.proxy import Proxy
from gym_client.seeding.fetch import require_seeder, time_limit
from gym_client.seeding.policy import SeedingPolicy
from gym_client.seeding.seeding import Seeding
from gym_client.seeding.server import SeederServer
from gym_client.seeding.store import SeedingTotals
from gym_server.seeding.probe import probe_seeder
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import readers

from gym_fed.config.hub.seeding import SeedingTerms
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, plain_pem
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import TLS_NAME, self_signed
from gym_fed.trust.wire.errors import TRAILER, from_rpc_error
from gym_fed.trust.wire.service import SeederStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.agent_scene import Recorder
from tests.support.contributor import RawContributor
from tests.support.loopback_hub import LoopbackHub, some_delta
from tests.support.seeding import SERVES, SeedingScene, server_of
from tests.support.tls_files import RawTlsServer, seeder_certificate, signed_by
from tests.support.wait import SECONDS


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[SeedingScene]:
    scene = SeedingScene(tmp_path)
    yield scene
    scene.close()


def ask(client: HubClient, sha256: str, **fields: Any) -> pb.FindSeederReply:
    reply: pb.FindSeederReply = client.call("FindSeeder", pb.FindSeederRequest(sha256=sha256, **fields))
    return reply


def fetched(seeder: HubClient, ticket: str) -> bytes:
    """What a seeder sends to whoever shows a ticket."""
    server = server_of(seeder)
    credentials = grpc.ssl_channel_credentials(root_certificates=server.certificate_pem.encode())
    options = [("grpc.ssl_target_name_override", TLS_NAME)]
    with grpc.secure_channel(f"127.0.0.1:{server.port}", credentials, options=options) as channel:
        try:
            call = SeederStub(channel).Fetch(pb.FetchRequest(ticket_json=ticket), timeout=SECONDS)
            return b"".join(chunk.data for chunk in call)
        except grpc.RpcError as error:
            raise from_rpc_error(error, "seeder") from None


def ticket_for(scene: SeedingScene, serving: HubClient, **changes: Any) -> SeedTicket:
    fed = scene.hub.fed
    expires = int(fed.clock.now()) + 60
    ticket = SeedTicket(
        fed.server, server_of(serving).fingerprint, scene.sha256, secrets.token_hex(16), expires
    )
    return dataclasses.replace(ticket, **changes)


def pausing(seconds: float, num_bytes: int, resumed: list[int] | None = None) -> Any:
    """A way to send a file that pauses once after some bytes, and notes when it resumes."""

    async def send(file: Any, context: Any) -> AsyncIterator[int]:
        for size in (num_bytes, -1):
            data = file.read(size)
            yield len(data)
            await context.write(pb.DownloadChunk(data=data))
            if size > 0:
                await asyncio.sleep(seconds)
                (resumed if resumed is not None else []).append(1)

    return send


def refused(action: Any) -> ErrorCode:
    with pytest.raises(GymError) as caught:
        action()
    return caught.value.code


# ---- what is served


def test_an_object_comes_from_the_contributor_who_has_it_and_the_hub_sends_one_copy(
    scene: SeedingScene,
) -> None:
    ann = scene.seeder("ann")
    bob = scene.contributor("bob", **SERVES)
    assert scene.fetch(bob) == 0
    assert scene.egress == len(scene.data)
    assert bob.seeding is not None
    assert bob.seeding.totals.now.received == len(scene.data)
    assert ann.seeding is not None
    assert ann.seeding.totals.now.served == len(scene.data)
    assert scene.displays["bob"].texts("seeding") == ["300.0 kB came from another contributor"]
    assert scene.hub.fed.traffic.counts()["seeding"]["tickets"] == 1
    scene.wait_for(lambda: scene.offers(bob))  # and passes it on


def test_a_connection_without_a_download_is_closed_soon(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_client.seeding.server._IDLE_SECONDS", 1)
    port = server_of(scene.seeder("ann")).port
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port), SECONDS)) as stranger:
        stranger.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        )  # and SETTINGS
        while stranger.recv(4096):
            pass


def test_without_the_section_in_the_policy_nothing_is_served_or_requested_from_others(
    scene: SeedingScene,
) -> None:
    scene.seeder("ann")
    bob = scene.hub.client(scene.folder / "bob")
    scene.clients.append(bob)
    (bob.home.objects / f"{scene.sha256}.seed").write_bytes(b"x")  # left by a killed run; fetch removes it
    assert scene.fetch(bob) == len(scene.data)
    assert SeedingPolicy().listen is None
    fetches_only = scene.contributor("cid")
    assert scene.fetch(fetches_only) == 0
    assert len(scene.tracker._seeders) == 1


def test_a_hub_without_seeding_refuses_announcements_and_serves_everything_itself(tmp_path: Path) -> None:
    scene = SeedingScene(tmp_path, seeding=None)
    ann = scene.contributor("ann", **SERVES)
    assert scene.fetch(ann) == len(scene.data)
    assert refused(lambda: ann.call("Seed", pb.SeedRequest(port=2000))) is ErrorCode.POLICY_REFUSED
    assert refused(lambda: ask(ann, scene.sha256)) is ErrorCode.POLICY_REFUSED
    scene.close()


def test_an_update_is_never_served_or_listed_even_if_its_bytes_are_public_too(scene: SeedingScene) -> None:
    delta = some_delta(scene.folder).read_bytes()
    sha256 = scene.publish(delta)
    with scene.hub.fed.database.transaction() as tx:
        insert_if_absent(tx, readers, sha256=sha256, contributor="c" + "0" * 16)  # as for every upload
    ann, bob = scene.seeder("ann"), scene.contributor("bob", **SERVES)
    assert scene.fetch(ann, sha256, len(delta)) == len(delta)
    ann.seeding._announce()  # type: ignore[union-attr]
    assert scene.fetch(bob, sha256, len(delta)) == len(delta)
    listed = {name for seeder in scene.tracker._seeders.values() for name in seeder.objects}
    assert listed == {scene.sha256}
    secret = hashlib.sha256(b"my rows").hexdigest()
    text = ticket_for(scene, ann, sha256=secret).signed(scene.hub.fed.key)
    assert refused(lambda: fetched(ann, text)) is ErrorCode.NOT_FOUND


def test_kinds_that_the_policy_does_not_serve_are_not_served(scene: SeedingScene) -> None:
    ann = scene.contributor("ann", **SERVES, serves=["base"])
    scene.fetch(ann)
    assert not scene.tracker._copies.of(scene.sha256)  # nobody waits for it
    text = ticket_for(scene, ann).signed(scene.hub.fed.key)
    assert refused(lambda: fetched(ann, text)) is ErrorCode.NOT_FOUND


# ---- tickets


@pytest.mark.parametrize(
    "flaw", ["forged", "expired", "other hub", "other seeder", "no json", "too long", "other kind"]
)
def test_a_ticket_that_is_not_the_hubs_for_this_seeder_and_time_is_refused_without_a_reason(
    scene: SeedingScene, flaw: str
) -> None:
    ann = scene.seeder("ann")
    changes: dict[str, dict[str, Any]] = {
        "expired": {"expires_at_seconds": int(scene.hub.fed.clock.now()) - 1},
        "other hub": {"server": "s" + "0" * 16},
        "other seeder": {"seeder": "sha256:" + "0" * 64},
        "other kind": {"expires_at_seconds": 1e12},
    }
    key = SigningKey.generate() if flaw == "forged" else scene.hub.fed.key
    text = ticket_for(scene, ann, **changes.get(flaw, {})).signed(key)
    text = {"no json": "ticket", "too long": json.dumps({"x": "y" * 4000})}.get(flaw, text)
    with pytest.raises(GymError) as caught:
        fetched(ann, text)
    assert (caught.value.code, caught.value.message) == (ErrorCode.PERMISSION_DENIED, "no valid ticket")


def test_a_ticket_is_good_for_one_download(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    text = ticket_for(scene, ann).signed(scene.hub.fed.key)
    assert fetched(ann, text) == scene.data
    assert refused(lambda: fetched(ann, text)) is ErrorCode.PERMISSION_DENIED


def test_a_stranger_gets_no_ticket(scene: SeedingScene) -> None:
    scene.seeder("ann")
    raw = RawContributor(scene.hub.address)
    request = pb.FindSeederRequest(sha256=scene.sha256)
    assert refused(lambda: raw.call(raw.stub.FindSeeder, request)) is ErrorCode.UNAUTHENTICATED
    assert refused(lambda: raw.call(raw.stub.Seed, pb.SeedRequest())) is ErrorCode.UNAUTHENTICATED
    raw.close()


# ---- seeders that do not deliver


def test_wrong_bytes_are_refused_reported_and_the_object_comes_from_the_hub(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    (scene.folder / "ann" / "seeds" / scene.sha256).write_bytes(b"evil" * 75_000)
    bob = scene.contributor("bob", **SERVES)
    assert scene.fetch(bob) == len(scene.data)
    assert scene.hub.fed.traffic.counts()["seeding"]["failures"] == 1
    assert scene.offers(ann)  # one report is not enough
    cid = scene.contributor("cid")
    bob.seeding.close()  # type: ignore[union-attr]
    assert scene.fetch(cid) == len(scene.data)
    ann.seeding._announce()  # type: ignore[union-attr]
    assert not scene.offers(ann)
    assert "reported" in scene.displays["ann"].texts("seeding")[-1]


@pytest.mark.parametrize("size", [1_000, 400_000])
def test_a_seeder_that_sends_another_size_is_given_up(
    scene: SeedingScene, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gym_client")
    ann = scene.seeder("ann")
    store = ann.seeding._store  # type: ignore[union-attr]
    path = scene.folder / "ann" / "seeds" / scene.sha256
    path.write_bytes(b"x" * size)
    store._seeds[scene.sha256] = dataclasses.replace(store._seeds[scene.sha256], size_bytes=size)
    bob = scene.contributor("bob")
    assert scene.fetch(bob) == len(scene.data)
    assert "a size other than" in caplog.text
    assert bob.seeding is not None
    assert bob.seeding.totals.now.received == 0  # the announced size is compared before the first byte


def test_a_seeder_that_says_the_size_and_sends_more_is_given_up(
    scene: SeedingScene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gym_client")
    scene.seeder("ann")
    with (scene.folder / "ann" / "seeds" / scene.sha256).open("ab") as file:
        file.write(b"more" * 100_000)
    server = server_of(scene.clients[0])
    server._store.find = lambda sha256: server._store._seeds[sha256]
    bob = scene.contributor("bob")
    assert scene.fetch(bob) == len(scene.data)
    assert "a size other than" in caplog.text
    assert bob.seeding is not None
    assert bob.seeding.totals.now.received <= len(scene.data)


def test_what_a_seeder_says_never_ends_a_download(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = scene.seeder("ann")
    for number, said in enumerate((pb.Error(code="interrupted").SerializeToString(), b"\xff\xff")):

        async def says(_: Any, context: Any, said: bytes = said) -> AsyncIterator[int]:
            await context.abort(grpc.StatusCode.CANCELLED, "stopped", ((TRAILER, said),))
            yield 0

        monkeypatch.setattr(server_of(ann), "_send", says)
        assert scene.fetch(scene.contributor(f"bob{number}")) == len(scene.data)


def test_a_seeder_that_is_fast_and_then_silent_is_given_up_after_the_grace_time(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = scene.seeder("ann")
    monkeypatch.setattr(server_of(ann), "_send", pausing(2.0, len(scene.data) - 1))
    assert scene.fetch(scene.contributor("bob", grace_seconds=0.5)) == len(scene.data)
    assert scene.hub.fed.traffic.counts()["seeding"]["failures"] == 1


def test_a_download_from_a_silent_seeder_stops_when_it_should(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = scene.seeder("ann")
    resumed: list[int] = []
    monkeypatch.setattr(server_of(ann), "_send", pausing(4.0, 1000, resumed))
    bob, stop = scene.contributor("bob", grace_seconds=100), threading.Event()
    threading.Timer(0.3, stop.set).start()
    cache = ObjectCache(bob.home.objects)
    found = refused(
        lambda: download(bob, cache, scene.sha256, len(scene.data), should_stop=stop.is_set, kind="soups")
    )
    assert found is ErrorCode.INTERRUPTED
    assert not resumed


def test_a_download_that_takes_longer_than_the_hub_would_is_given_up_without_a_report(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = scene.seeder("ann"), scene.contributor("bob")
    monkeypatch.setattr(server_of(ann), "_send", pausing(0.8, 200_000))
    monkeypatch.setattr("gym_client.seeding.seeding.time_limit", lambda *_: 0.3)
    assert scene.fetch(bob) == len(scene.data)
    assert scene.hub.fed.traffic.counts()["seeding"]["failures"] == 0


def test_the_time_for_an_object_follows_from_the_hubs_pace(scene: SeedingScene) -> None:
    bob = scene.contributor("bob")
    size = 1 << 30
    assert time_limit(bob, size, 0.0) == size / (64 << 10)
    for pace, least in ((32 << 10, 32 << 10), (1 << 20, 128 << 10), (1 << 30, 256 << 10)):
        bob.home.remember(down_bytes_per_second=pace)
        assert time_limit(bob, size, 0.0) == size / least


def test_a_seeder_that_refuses_after_the_first_byte_is_reported(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = scene.seeder("ann")
    busy = pb.Error(code="busy").SerializeToString()

    async def refuses(_: Any, context: Any) -> AsyncIterator[int]:
        await context.write(pb.DownloadChunk(data=b"s"))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "busy", ((TRAILER, busy),))
        yield 0

    monkeypatch.setattr(server_of(ann), "_send", refuses)
    assert scene.fetch(scene.contributor("bob")) == len(scene.data)
    assert scene.hub.fed.traffic.counts()["seeding"]["failures"] == 1


def test_seeders_are_tried_until_the_failed_bytes_are_those_of_the_object(scene: SeedingScene) -> None:
    for name in ("ann", "bob"):
        scene.seeder(name)
        (scene.folder / name / "seeds" / scene.sha256).write_bytes(b"evil" * 75_000)
    cid = scene.contributor("cid")
    assert scene.fetch(cid) == len(scene.data)
    assert cid.seeding is not None
    assert cid.seeding.totals.now.received == len(scene.data)


def test_a_finished_download_frees_its_slot_though_the_contributor_serves_nothing(
    scene: SeedingScene,
) -> None:
    scene.seeder("ann", max_downloads=1)
    for name in ("bob", "cid"):
        assert scene.fetch(scene.contributor(name)) == 0
    assert not scene.tracker._searches.downloads


def test_a_dead_seeder_costs_little_time_and_the_object_comes_from_the_hub(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    server_of(ann).close()
    began = time.monotonic()
    assert scene.fetch(scene.contributor("bob")) == len(scene.data)
    assert (
        scene.hub.fed.traffic.counts()["seeding"]["failures"] == 0
    )  # the cause may be the downloader's network
    assert time.monotonic() - began < SECONDS


def test_a_seeder_that_sends_nothing_is_given_up_after_the_grace_time(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = scene.seeder("ann")

    async def silence(*_: Any) -> AsyncIterator[int]:
        await asyncio.sleep(SECONDS)
        yield 0

    monkeypatch.setattr(server_of(ann), "_send", silence)
    assert scene.fetch(scene.contributor("bob", grace_seconds=0.3)) == len(scene.data)
    assert scene.hub.fed.traffic.counts()["seeding"]["failures"] == 1


def test_a_seeder_whose_key_is_not_the_announced_one_gets_no_ticket_and_the_hub_delivers(
    scene: SeedingScene,
) -> None:
    ann = scene.seeder("ann")
    (listed,) = scene.tracker._seeders.values()
    listed.certificate_pem = seeder_certificate()
    assert scene.fetch(scene.contributor("bob")) == len(scene.data)
    assert ann.seeding is not None
    assert ann.seeding.totals.now.served == 0


def test_through_a_proxy_nobody_seeds(scene: SeedingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.seeder("ann")
    monkeypatch.setattr(
        "gym_client.seeding.seeding.proxy_for", lambda address: Proxy("proxy", 3128, "https_proxy")
    )
    bob = scene.contributor("bob", **SERVES)
    assert scene.fetch(bob) == len(scene.data)
    assert len(scene.tracker._seeders) == 1
    assert "through a proxy" in scene.displays["bob"].texts("seeding")[0]


def test_a_second_seeder_is_tried_before_the_hub(scene: SeedingScene) -> None:
    ann, bob = scene.seeder("ann"), scene.seeder("bob")
    server_of(ann).close()
    assert scene.fetch(scene.contributor("cid")) == 0
    assert bob.seeding is not None
    assert bob.seeding.totals.now.served > 0


# ---- the contributor's limits


def test_beyond_the_days_bytes_a_seeder_refuses_and_is_not_reported(scene: SeedingScene) -> None:
    ann = scene.seeder("ann", max_bytes_per_day=len(scene.data) + 2000)
    assert scene.fetch(scene.contributor("bob")) == 0
    assert scene.fetch(scene.contributor("cid")) == len(scene.data)
    assert scene.hub.fed.traffic.counts()["seeding"]["failures"] == 0
    ann.close()
    assert SeedingTotals(ann.home).now.served_on_day == len(scene.data)


def test_the_rate_limits_of_seeding_and_of_all_uploads_are_kept(scene: SeedingScene) -> None:
    ann = scene.seeder("ann", max_bytes_per_second=128 << 10)
    server = server_of(ann)
    taken: list[float] = []
    server.rate._sleep = ann.rates.up._sleep = lambda seconds: taken.append(seconds) or time.sleep(0)
    server.rate._clock = ann.rates.up._clock = lambda: sum(taken)
    server.rate._at = ann.rates.up._at = 0.0
    ann.rates.up.bytes_per_second = 64 << 10
    assert fetched(ann, ticket_for(scene, ann).signed(scene.hub.fed.key)) == scene.data
    assert sum(taken) >= (len(scene.data) - (128 << 10)) / (64 << 10)


def test_no_more_downloads_are_served_at_once_than_the_policy_allows(scene: SeedingScene) -> None:
    ann = scene.seeder("ann", max_downloads=1)
    server_of(ann)._busy = 1
    assert refused(lambda: fetched(ann, ticket_for(scene, ann).signed(scene.hub.fed.key))) is ErrorCode.BUSY
    server_of(ann)._busy = 0
    assert ask(scene.contributor("bob"), scene.sha256).HasField("seeder")
    waits = ask(scene.contributor("cid"), scene.sha256)  # the only slot is taken
    assert not waits.HasField("seeder")
    assert waits.wait_seconds > 0


def test_a_paused_contributor_serves_nothing_and_goes_on_afterwards(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    ann.pause_seeding("pause", True)
    text = ticket_for(scene, ann).signed(scene.hub.fed.key)
    assert refused(lambda: fetched(ann, text)) is ErrorCode.BUSY
    scene.wait_for(lambda: not scene.offers(ann))
    ann.pause_seeding("pause", False)
    scene.wait_for(lambda: scene.offers(ann))


def test_a_pause_during_an_upload_lasts_until_both_have_ended(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    for reason, paused, expected in (
        ("upload", True, True),
        ("pause", True, True),
        ("upload", False, True),
        ("pause", False, False),
    ):
        ann.pause_seeding(reason, paused)
        assert server_of(ann).is_paused is expected


def test_a_pause_that_began_before_serving_holds_when_it_starts(scene: SeedingScene) -> None:
    client = scene.contributor("ann")
    seeding = Seeding(client, SeedingPolicy(**SERVES), SeedingTerms(min_bytes=1), scene.displays["ann"], 1.0)
    client.seeding = seeding
    seeding.pause("pause", True)
    seeding.start()
    scene.fetch(client)
    assert server_of(client).is_paused
    assert not scene.offers(client)


def test_removing_the_section_from_the_policy_ends_seeding(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    ann.seeding.follow(None)  # type: ignore[union-attr]
    assert not scene.tracker._seeders
    assert not (scene.folder / "ann" / "seeds").exists()
    assert scene.fetch(ann) == 0  # it is cached
    ann.seeding.follow(SeedingPolicy(**SERVES))  # type: ignore[union-attr]
    assert "next join" in scene.displays["ann"].texts("seeding")[-1]
    assert scene.fetch(scene.contributor("bob")) == len(scene.data)


def test_a_pause_ends_running_downloads_and_nobody_reports_them(scene: SeedingScene) -> None:
    ann, bob = scene.seeder("ann", max_bytes_per_second=64 << 10), scene.contributor("bob")
    server_of(ann).rate._tokens = 0.0  # 300 kB take five seconds
    pauser = threading.Timer(0.5, lambda: ann.pause_seeding("pause", True))
    pauser.start()
    assert scene.fetch(bob) == len(scene.data)
    pauser.join()
    assert ann.seeding is not None
    assert 0 < ann.seeding.totals.now.served < len(scene.data)
    assert not scene.tracker._reports._reports
    totals = ann.seeding.totals
    scene.wait_for(
        lambda: totals.now.served_on_day == totals.now.served
    )  # the rest of the object is released


def test_nothing_is_served_before_the_terms_are_accepted(scene: SeedingScene) -> None:
    client = scene.hub.client(scene.folder / "ann")
    scene.clients.append(client)
    seeding = Seeding(client, SeedingPolicy(**SERVES), SeedingTerms(min_bytes=1), Recorder())
    client.seeding = seeding
    assert scene.fetch(client) == len(scene.data)
    assert seeding._server is None
    assert not scene.tracker._seeders


def test_a_port_that_is_in_use_is_reported_and_the_download_goes_on(scene: SeedingScene) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        ann = scene.contributor("ann", listen=f"127.0.0.1:{port}")
    (text,) = scene.displays["ann"].texts("seeding")
    assert f"127.0.0.1:{port}" in text
    assert scene.fetch(ann) == len(scene.data)


def test_a_seeding_server_that_does_not_start_in_time_is_reported_and_the_download_goes_on(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = SeederServer._serve

    async def serve_late(self: SeederServer) -> int:
        port = await serve(self)
        await asyncio.sleep(3600)
        return port

    monkeypatch.setattr(SeederServer, "_serve", serve_late)
    monkeypatch.setattr(SeederServer._wait, "__defaults__", (0.0,))  # of its parameter seconds
    ann = scene.contributor("ann", **SERVES)
    (text,) = scene.displays["ann"].texts("seeding")
    assert "serves nothing" in text
    assert scene.fetch(ann) == len(scene.data)


def test_a_withdrawal_does_not_report_that_the_machine_is_listed_again(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    assert ann.seeding is not None
    ann.seeding._show("the port is closed")  # type: ignore[attr-defined]
    ann.pause_seeding("pause", True)
    scene.wait_for(lambda: not scene.offers(ann))
    assert scene.displays["ann"].texts("seeding")[-1] == "this machine is not listed: the port is closed"


def test_an_error_of_this_machine_is_raised_and_no_seeder_is_reported(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.seeder("ann")
    bob = scene.contributor("bob")

    def is_full(*_: Any) -> None:
        raise GymError(ErrorCode.DISK_FULL, "the disk is full")

    monkeypatch.setattr(bob.seeding.totals, "receive", is_full)  # type: ignore[union-attr]
    assert refused(lambda: scene.fetch(bob)) is ErrorCode.DISK_FULL
    assert not scene.tracker._reports._reports
    assert not scene.tracker._searches.wanted


def test_a_search_that_is_interrupted_while_it_waits_ends_at_the_hub(scene: SeedingScene) -> None:
    scene.seeder("ann", max_downloads=1)
    assert ask(scene.contributor("bob"), scene.sha256).HasField("seeder")
    cid = scene.contributor("cid")
    cache = ObjectCache(cid.home.objects)

    def fetch() -> None:
        download(cid, cache, scene.sha256, len(scene.data), should_stop=lambda: True, kind="soups")

    assert refused(fetch) is ErrorCode.INTERRUPTED
    assert scene.tracker._searches.wanted[scene.sha256] == 1  # bob's


def test_a_changed_policy_counts_at_once_or_is_said_to_count_later(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    assert ann.seeding is not None
    ann.seeding.follow(SeedingPolicy(**{**SERVES, "listen": "127.0.0.1:9999"}, max_downloads=1))
    assert "next join" in scene.displays["ann"].texts("seeding")[-1]
    scene.wait_for(lambda: next(iter(scene.tracker._seeders.values())).slots == 1)
    ann.seeding.follow(SeedingPolicy(**SERVES, serves=["base"]))
    scene.wait_for(lambda: not scene.offers(ann))
    assert not list((scene.folder / "ann" / "seeds").iterdir())
    ann.seeding.follow(SeedingPolicy())
    assert not scene.tracker._seeders
    assert ann.seeding._server is None  # type: ignore[attr-defined]


def test_with_too_low_an_upload_limit_nothing_is_served_and_the_reason_is_reported(
    scene: SeedingScene,
) -> None:
    ann = scene.seeder("ann")
    ann.rates.up.bytes_per_second = 50_000
    ann.seeding._announce()  # type: ignore[union-attr]
    assert not scene.tracker._seeders
    assert "max_upload_bytes_per_second" in scene.displays["ann"].texts("seeding")[-1]
    ann.rates.up.bytes_per_second = None
    ann.seeding._announce()  # type: ignore[union-attr]
    assert scene.offers(ann)
    assert scene.displays["ann"].texts("seeding")[-1] == "this machine is listed again"


def test_seeding_pauses_while_an_update_is_sent_under_an_upload_limit(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    objects = TaskObjects(ann.home, ann, Policy(), Traffic(ann.home, ann.pin.server))
    was_paused: list[bool] = []

    def should_stop() -> bool:
        was_paused.append(server_of(ann).is_paused)
        return False

    for limit in (None, 10 << 20):
        ann.rates.up.bytes_per_second = limit
        was_paused.clear()
        path = objects.cache.put(f"an update under {limit}".encode())
        request = pb.SubmitRequest(message_id="m")
        ref = pb.ArrayRef(sha256=path.name, size_bytes=path.stat().st_size, stype="numpy.ndarray")
        request.content.arrays["update"].arrays.append(ref)
        request.content.order.append("update")
        hooks = Hooks(should_stop=should_stop)
        objects.upload(pb.Task(message_id="m"), request, hooks, lambda action: action())
        assert set(was_paused) == {limit is not None}
        assert not server_of(ann).is_paused
    scene.wait_for(lambda: scene.offers(ann))


def test_a_cached_object_is_served_in_the_next_run_too(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    ann.seeding.follow(SeedingPolicy(**SERVES, serves=[]))  # type: ignore[union-attr]
    scene.wait_for(lambda: not scene.offers(ann))
    ann.seeding.follow(SeedingPolicy(**SERVES))  # type: ignore[union-attr]
    assert scene.fetch(ann) == 0
    scene.wait_for(lambda: scene.offers(ann))


def test_an_object_that_is_deleted_after_its_ticket_is_sent_to_the_end(scene: SeedingScene) -> None:
    ann = scene.seeder("ann")
    _, file, _ = server_of(ann)._admit(ticket_for(scene, ann))
    ann.seeding._store.follow(SeedingPolicy(serves=[]))  # type: ignore[union-attr]
    assert file.read() == scene.data
    file.close()


def test_a_failing_withdrawal_leaves_neither_a_server_nor_links(
    scene: SeedingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = scene.seeder("ann")
    server = server_of(ann)

    def fails(*_: Any) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(ann, "call", fails)
    with pytest.raises(RuntimeError):
        ann.seeding.close()  # type: ignore[union-attr]
    assert server._closed.is_set()
    assert not (scene.folder / "ann" / "seeds").exists()


# ---- addresses


def test_a_ca_whose_certificate_a_third_party_shows_is_not_the_announced_key() -> None:
    authority, third_party = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    announced = self_signed(plain_pem(authority)).decode()
    shown = signed_by(authority, third_party)
    for certificate, key, expected in ((shown, third_party, False), (announced.encode(), authority, True)):
        server = RawTlsServer(certificate, plain_pem(key))
        try:
            assert asyncio.run(probe_seeder("127.0.0.1", server.port, announced)) is expected
        finally:
            server.close()


def test_only_the_address_that_the_hub_sees_with_the_announced_key_is_listed(scene: SeedingScene) -> None:
    ann, bob = scene.seeder("ann"), scene.contributor("bob")
    stolen = pb.SeedRequest(port=server_of(ann).port, certificate_pem=server_of(ann).certificate_pem, slots=1)
    assert "another contributor" in bob.call("Seed", stolen).why_not
    key = seeder_certificate()
    other_key = pb.SeedRequest(port=server_of(ann).port, certificate_pem=key, slots=1)
    assert "cannot reach" in bob.call("Seed", other_key).why_not
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        unused = pb.SeedRequest(port=listener.getsockname()[1], certificate_pem=key)
        assert "cannot reach" in bob.call("Seed", unused).why_not
    for port in (80, 70_000):
        low = pb.SeedRequest(port=port, certificate_pem=key)
        assert refused(lambda low=low: bob.call("Seed", low)) is ErrorCode.USAGE
    assert len(scene.tracker._seeders) == 1


@pytest.mark.parametrize(
    ("host", "hub", "allowed"),
    [
        ("8.8.8.8", "hub.example.org", True),
        ("192.168.1.9", "hub.example.org", False),
        ("127.0.0.1", "hub.example.org", False),
        ("127.0.0.1", "192.168.1.2", False),
        ("192.168.1.9", "192.168.1.2", True),
        ("169.254.169.254", "127.0.0.1", False),
        ("::ffff:127.0.0.1", "8.8.4.4", False),
        ("localhost", "localhost", False),
        ("127.0.0.1", "localhost", True),
        ("evil.example.org", "hub.example.org", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("fe80::1", "8.8.4.4", False),
    ],
)
def test_a_hub_cannot_send_a_contributor_to_itself_or_into_its_own_network(
    host: str, hub: str, allowed: bool
) -> None:
    seeder = pb.SeederInfo(host=host, port=9445)
    if allowed:
        require_seeder(seeder, hub)
    else:
        assert refused(lambda: require_seeder(seeder, hub)) is ErrorCode.POLICY_REFUSED


def test_a_hub_cannot_send_a_contributor_to_a_low_port() -> None:
    assert (
        refused(lambda: require_seeder(pb.SeederInfo(host="8.8.8.8", port=443), "hub"))
        is ErrorCode.POLICY_REFUSED
    )


def test_a_malformed_announcement_or_name_is_refused_as_such(scene: SeedingScene) -> None:
    bob = scene.contributor("bob")
    for pem in (seeder_certificate() * 2, seeder_certificate().replace("-----BEGIN", "\u00fc-----BEGIN", 1)):
        request = pb.SeedRequest(port=9445, certificate_pem=pem)
        assert refused(lambda request=request: bob.call("Seed", request)) is ErrorCode.USAGE
    named = pb.SeedRequest(port=9445, certificate_pem=seeder_certificate(), sha256=["A" * 64])
    assert refused(lambda: bob.call("Seed", named)) is ErrorCode.USAGE
    assert refused(lambda: ask(bob, "../secret")) is ErrorCode.USAGE


def test_a_malformed_certificate_is_refused_and_changes_nothing(scene: SeedingScene) -> None:
    bob = scene.contributor("bob")
    bad = pb.SeedRequest(port=9445, certificate_pem="no certificate")
    assert refused(lambda: bob.call("Seed", bad)) is ErrorCode.USAGE
    assert (
        refused(lambda: bob.call("Seed", pb.SeedRequest(port=9445, certificate_pem="x" * 5000)))
        is ErrorCode.TOO_LARGE
    )
    many = pb.SeedRequest(port=9445, certificate_pem="x", sha256=["0" * 64] * 1001)
    assert refused(lambda: bob.call("Seed", many)) is ErrorCode.TOO_LARGE


def test_a_hub_that_hides_updates_allows_no_seeding(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="seeding") as caught:
        LoopbackHub(tmp_path / "hub", seeding={}, secure_aggregation={"threshold": 3, "step_norm": 1.0})
    assert caught.value.code is ErrorCode.CONFIG_INVALID
