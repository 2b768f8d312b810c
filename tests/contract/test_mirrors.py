"""Mirrors over real gRPC: what they serve, who may read it, and what a hostile one costs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from gym_client.cli.announced import announced_mirrors
from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.ledger.copy import LedgerCopy
from gym_client.mirror import follower, source
from gym_client.mirror.source import Mirrors
from gym_client.seeding.fetch import FetchTarget, begin_channel
from gym_client.variants import push_variant, sign_variant
from gym_server.mirror.service import MirrorService

from gym_fed.config.hub.mirrors import MirrorConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import harmless
from gym_fed.trust.ledger.export import verify_file
from gym_fed.trust.mirrors.listing import SignedMirrors
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub, manifest_of, some_delta
from tests.support.loopback_mirror import HostileMirror, LoopbackMirror, LoopbackService, add_version

DATA = bytes(range(256)) * 1600


@pytest.fixture
def calls() -> Counter[str]:
    return Counter()


@pytest.fixture
def hub(tmp_path: Path, calls: Counter[str]) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path / "hub", on_call=lambda method: calls.update([method]))
    yield hub
    hub.close()


@pytest.fixture
def ann(tmp_path: Path, hub: LoopbackHub) -> Iterator[HubClient]:
    with hub.client(tmp_path / "ann") as client:
        client.status()
        yield client


@pytest.fixture
def mirror(tmp_path: Path, hub: LoopbackHub) -> Iterator[LoopbackMirror]:
    mirror = LoopbackMirror(tmp_path / "mirror", hub)
    yield mirror
    mirror.close()


def fetch(client: HubClient, sha256: str) -> bytes:
    cache = ObjectCache(client.home.objects)
    return download(client, cache, sha256, len(DATA), kind="soups").read_bytes()


def test_objects_and_the_ledger_come_from_a_mirror_and_are_the_hubs(
    hub: LoopbackHub,
    mirror: LoopbackMirror,
    ann: HubClient,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soup = add_version(hub, DATA)
    mirror.take()
    monkeypatch.setattr(source, "_LEAST_ENTRIES", 1)
    ann.mirrors = Mirrors(ann, [mirror.config])
    calls.clear()
    assert fetch(ann, soup) == DATA
    copy = LedgerCopy(ann.home, hub.fed.key.public_key)
    head = copy.sync(ann)
    assert verify_file(copy.path, hub.fed.key.public_key)[1].entries == head.size
    assert calls["Download"] == calls["Ledger"] == 0, "the hub sent neither"


def test_a_mirror_serves_public_variants_and_proofs_to_accounts_and_nothing_to_strangers(
    tmp_path: Path,
    hub: LoopbackHub,
    mirror: LoopbackMirror,
    ann: HubClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, (name, readers) in enumerate({"shown": ["*"], "own": [], "other": ["*"]}.items()):
        path = some_delta(tmp_path, number)
        push_variant(ann, path, sign_variant(ann, manifest_of(path, name)), readers)
    passes: list[Path] = []

    def verified(path: Path, *more: Any) -> Any:
        passes.append(path)
        return verify_file(path, *more)

    monkeypatch.setattr(follower, "verify_file", verified)
    mirror.take()
    assert len(passes) == 2, "the ledger is verified once for its versions, and once for all variants"
    pem = (mirror.folder.keys / "tls.crt").read_bytes()
    host, port = mirror.config.address.split(":")
    with begin_channel(FetchTarget(host, int(port), pem.decode(), "the mirror")) as channel:
        stub = HubStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListVariants(pb.ListVariantsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        mirrors = Mirrors(ann, [mirror.config])
        session = mirrors._metadata(mirrors._mirrors[0], channel)
        found = stub.ListVariants(pb.ListVariantsRequest(), metadata=session).variants
        assert [info.is_public for info in found] == [True, True]
        proof = stub.LedgerProof(pb.LedgerProofRequest(sequence=1))
        assert proof.head_json == ann.status().ledger_head_json
        with pytest.raises(grpc.RpcError) as caught:
            stub.Status(pb.StatusRequest())
        assert "mirror" in str(caught.value.details())
        with pytest.raises(grpc.RpcError) as caught:
            stub.Submit(pb.SubmitRequest(), metadata=session)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("text", ["9" * 6000, "[red]\x1b[2J\n", "../../etc/passwd", "[" * 3000])
def test_no_text_or_number_in_a_request_fails_a_mirror(
    hub: LoopbackHub, mirror: LoopbackMirror, ann: HubClient, text: str
) -> None:
    mirror.take()
    pem = (mirror.folder.keys / "tls.crt").read_bytes()
    host, port = mirror.config.address.split(":")
    with begin_channel(FetchTarget(host, int(port), pem.decode(), "the mirror")) as channel:
        mirrors = Mirrors(ann, [mirror.config])
        session = mirrors._metadata(mirrors._mirrors[0], channel)
        for method in pb.DESCRIPTOR.services_by_name["Hub"].methods:
            if method.name not in MirrorService.__dict__:
                continue
            request = GetMessageClass(method.input_type)()
            for field in method.input_type.fields:
                if field.type == field.TYPE_STRING:
                    setattr(request, field.name, text)
                elif field.type == field.TYPE_UINT64:
                    setattr(request, field.name, 2**64 - 1)
            error = failure(getattr(HubStub(channel), method.name), request, session)
            details = "" if error is None else str(error.details())
            assert error is None or error.code() is not grpc.StatusCode.INTERNAL, (method.name, details)
            assert harmless(details) == details, method.name


def failure(call: Any, request: Any, session: Any) -> Any:
    """Return the error with which a call ends, or None."""
    try:
        answer = call(request, metadata=session)
        list(answer if isinstance(answer, Iterator) else [answer])
    except grpc.RpcError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("chunks", "then"),
    [
        ([b"\x01" * len(DATA)], "end"),
        ([DATA[:1000]], "end"),
        ([DATA[:1000]], "silence"),
        ([b"\x02" * 65536], "endless"),
    ],
    ids=["wrong bytes", "ends in the middle", "silent", "endless"],
)
def test_a_hostile_mirror_costs_time_only_and_is_not_asked_again(
    tmp_path: Path, hub: LoopbackHub, ann: HubClient, chunks: list[bytes], then: str
) -> None:
    soup, hostile = add_version(hub, DATA), HostileMirror(len(DATA), chunks, then)
    server = LoopbackService(tmp_path / "keys", lambda tls: (hostile, None))
    try:
        ann.mirrors = Mirrors(ann, [server.config], grace_seconds=0.3)
        assert fetch(ann, soup) == DATA
        other = add_version(hub, DATA[::-1])
        assert fetch(ann, other) == DATA[::-1]
        assert hostile.num_calls == 1
    finally:
        server.close()


def test_entries_that_the_hub_did_not_sign_are_not_taken_from_a_mirror(
    tmp_path: Path, hub: LoopbackHub, ann: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_LEAST_ENTRIES", 1)
    hostile = HostileMirror(0, [], "end")
    server = LoopbackService(tmp_path / "keys", lambda tls: (hostile, None))
    try:
        ann.mirrors = Mirrors(ann, [server.config])
        copy = LedgerCopy(ann.home, hub.fed.key.public_key)
        head = copy.sync(ann)
        assert hostile.num_calls == 1
        assert verify_file(copy.path, hub.fed.key.public_key)[1].entries == head.size
    finally:
        server.close()


def test_a_mirror_with_another_key_than_the_hub_signed_is_sent_no_login(
    hub: LoopbackHub, mirror: LoopbackMirror, ann: HubClient
) -> None:
    soup = add_version(hub, DATA)
    mirror.take()
    wrong = MirrorConfig(address=mirror.config.address, fingerprint="sha256:" + "0" * 64)
    ann.mirrors = Mirrors(ann, [wrong])
    assert fetch(ann, soup) == DATA
    signed = SignedMirrors.sign(hub.fed.key, [mirror.config]).model_dump(mode="json")
    assert SignedMirrors.verified(signed, hub.fed.key.public_key).mirrors == [mirror.config]
    with pytest.raises(GymError) as caught:
        SignedMirrors.verified({**signed, "mirrors": [wrong]}, hub.fed.key.public_key)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID


def test_a_hub_announces_its_mirrors_and_a_contributor_reads_the_signed_list(tmp_path: Path) -> None:
    named = {"address": "mirror.example.org:9450", "fingerprint": "sha256:" + "1" * 64}
    hub = LoopbackHub(tmp_path / "naming", mirrors=[named])
    try:
        with hub.client(tmp_path / "bob") as bob:
            found = announced_mirrors(bob.status())
            assert [mirror.model_dump() for mirror in found] == [named]
            assert "mirror.example.org:9450" in Mirrors(bob, found).addresses
    finally:
        hub.close()


def test_a_mirror_stops_at_a_fork_keeps_the_proof_and_serves_what_it_had(
    tmp_path: Path, hub: LoopbackHub, mirror: LoopbackMirror, ann: HubClient
) -> None:
    soup = add_version(hub, DATA)
    shutil.copytree(hub.fed.folder, tmp_path / "other")
    add_version(hub, DATA[::-1])
    mirror.take()
    other = LoopbackHub(tmp_path / "other")
    try:
        with other.client(tmp_path / "bob"):
            pass
        forked = add_version(other, DATA[1:] + DATA[:1])
        add_version(other, DATA[2:] + DATA[:2])
        mirror.client.close()
        follower, mirror.client = mirror.follow(other)
        with pytest.raises(GymError) as caught:
            follower.follow()
        assert caught.value.code is ErrorCode.LEDGER_FORKED
    finally:
        other.close()
    mirror.service.refresh()
    content = mirror.folder.content()
    assert content is not None
    assert content.halted.startswith("ledger-forked")
    assert list((mirror.folder.home / "proofs").glob("*.json")), "the evidence"
    assert forked not in content.objects
    ann.mirrors = Mirrors(ann, [mirror.config])
    assert fetch(ann, soup) == DATA
