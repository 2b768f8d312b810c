"""What a hub refuses, over real gRPC with TLS: each with its own error, and with flat memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gym_client.cli.join import enter
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.variants import pull_variant, push_variant, sign_variant

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.statements import Revocation, Rotation, TransferOrder
from gym_fed.trust.ledger.heads import EntryProof
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.contributor import RawContributor, chunks, random_delta, spec_of
from tests.support.hub import HubProcess
from tests.support.loopback_hub import manifest_of
from tests.support.wait import SECONDS

MIB = 1 << 20
PART = 1 << 18
"""Bytes of a chunk: the base is tiny, and the hub takes about 1 MiB besides its weights."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("hub")
    config = {
        "rounds": {"num_rounds": 50, "min_contributors": 40, "deadline_seconds": 3000, "lease_seconds": 600},
        "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
        "admission": {"max_update_bytes": MIB, "max_norm": 1000.0},
    }
    hub = HubProcess(folder / "hub", config, str(tiny_base)).start()
    yield hub
    hub.stop()


@pytest.fixture
def contributor(hub: HubProcess) -> Iterator[RawContributor]:
    found = RawContributor(hub.address).enrol()
    yield found
    found.close()


@pytest.fixture
def delta(contributor: RawContributor, tmp_path: Path, tiny_base: Path) -> bytes:
    seed = int.from_bytes(contributor.key.public_key[:4], "little")
    return random_delta(tmp_path, contributor.status.base_digest, seed, str(tiny_base))


def refused(code: ErrorCode, function: object, *arguments: object) -> GymError:
    with pytest.raises(GymError) as caught:
        function(*arguments)  # type: ignore[operator]
    assert caught.value.code is code, caught.value
    return caught.value


def test_an_honest_update_is_admitted_with_a_signed_receipt(
    contributor: RawContributor, delta: bytes
) -> None:
    receipt = contributor.contribute(delta)
    assert receipt["verdict"] == "admitted"
    EntryProof.from_dict(receipt["proof"]).verify(contributor.status.ledger_public_key)


def test_the_same_answer_again_gets_the_same_receipt(contributor: RawContributor, delta: bytes) -> None:
    task = contributor.next_task()
    contributor.upload(delta)
    manifest = contributor.manifest(task, delta)
    first = contributor.submit(task.message_id, manifest)
    assert contributor.submit(task.message_id, manifest) == first


def test_an_upload_larger_than_declared_is_refused(contributor: RawContributor, delta: bytes) -> None:
    name = hashlib.sha256(delta).hexdigest()
    contributor.call(
        contributor.stub.BeginUpload, pb.BeginUploadRequest(sha256=name, size_bytes=len(delta) - 1)
    )
    error = refused(ErrorCode.TOO_LARGE, contributor.call, contributor.stub.Upload, chunks(name, delta))
    assert str(len(delta) - 1) in error.message


def test_a_declaration_above_the_cap_is_refused_before_a_byte(contributor: RawContributor) -> None:
    request = pb.BeginUploadRequest(sha256="a" * 64, size_bytes=MIB + 1)
    error = refused(ErrorCode.TOO_LARGE, contributor.call, contributor.stub.BeginUpload, request)
    assert str(MIB) in error.message


def test_bytes_that_do_not_hash_to_their_name_are_refused(contributor: RawContributor) -> None:
    refused(ErrorCode.HASH_MISMATCH, contributor.upload, b"x" * 100, 100, "b" * 64)


def test_an_undeclared_object_is_refused(contributor: RawContributor) -> None:
    refused(ErrorCode.NOT_FOUND, contributor.call, contributor.stub.Upload, chunks("c" * 64, b"data"))


def test_an_upload_goes_on_where_it_stopped(contributor: RawContributor) -> None:
    data = bytes(range(256)) * 4_000
    name = hashlib.sha256(data).hexdigest()
    begin = pb.BeginUploadRequest(sha256=name, size_bytes=len(data))
    contributor.call(contributor.stub.BeginUpload, begin)
    partial = contributor.call(contributor.stub.Upload, chunks(name, data[: 3 * PART]))
    assert (partial.offset, partial.complete) == (3 * PART, False)
    assert contributor.call(contributor.stub.BeginUpload, begin).offset == 3 * PART
    gap = refused(
        ErrorCode.USAGE, contributor.call, contributor.stub.Upload, chunks(name, data, 3 * PART + 1)
    )
    assert "offset" in gap.message
    assert contributor.upload(data).complete


def test_a_body_before_authentication_is_refused_and_memory_stays_flat(hub: HubProcess) -> None:
    stranger = RawContributor(hub.address)
    before, sent = hub.peak_memory_bytes(), [0]

    def body() -> Iterator[pb.UploadChunk]:
        for index in range(512):
            sent[0] = index + 1
            yield pb.UploadChunk(sha256="d" * 64, offset=index * MIB, data=bytes(MIB))

    refused(ErrorCode.UNAUTHENTICATED, stranger.call, stranger.stub.Upload, body())
    stranger.close()
    assert sent[0] < 512
    assert hub.peak_memory_bytes() - before < 32 * MIB


def test_a_message_above_the_cap_is_refused_before_it_is_buffered(contributor: RawContributor) -> None:
    request = pb.UploadChunk(sha256="e" * 64, data=bytes(8 * MIB))
    with pytest.raises(grpc.RpcError) as caught:
        contributor.stub.Upload(iter([request]), timeout=SECONDS, metadata=contributor.metadata)
    assert from_rpc_error(caught.value, "hub").code is ErrorCode.TOO_LARGE


def test_a_forged_session_is_refused(hub: HubProcess, contributor: RawContributor) -> None:
    contributor.session = contributor.session[:-4] + "0000"
    refused(ErrorCode.UNAUTHENTICATED, contributor.call, contributor.stub.Account, pb.AccountRequest())


def test_a_replayed_manifest_is_refused(hub: HubProcess, contributor: RawContributor, delta: bytes) -> None:
    task = contributor.next_task()
    contributor.upload(delta)
    manifest = contributor.manifest(task, delta)
    contributor.submit(task.message_id, manifest)
    other = RawContributor(hub.address, key=contributor.key)
    other.session = contributor.session
    changed = manifest.model_copy(update={"num_examples": 99})
    refused(ErrorCode.REPLAYED, other.submit, task.message_id, changed)
    other.close()


def test_another_contributors_signature_is_refused(
    hub: HubProcess, contributor: RawContributor, delta: bytes
) -> None:
    task = contributor.next_task()
    contributor.upload(delta)
    manifest = contributor.manifest(task, delta)
    refused(
        ErrorCode.SIGNATURE_INVALID,
        contributor.submit,
        task.message_id,
        manifest,
        manifest.sign(SigningKey.generate()),
    )
    as_other = contributor.manifest(task, delta, contributor="c00000000000000000000000000000000")
    refused(ErrorCode.SIGNATURE_INVALID, contributor.submit, task.message_id, as_other)
    assert contributor.submit(task.message_id, manifest)["verdict"] == "admitted"


def test_an_update_for_an_old_base_is_refused(contributor: RawContributor, delta: bytes) -> None:
    task = contributor.next_task()
    contributor.upload(delta)
    old = contributor.manifest(task, delta, base_digest="sha256:" + "0" * 64)
    receipt = contributor.submit(task.message_id, old)
    assert (receipt["verdict"], receipt["code"]) == ("refused", "base-mismatch")


def test_an_update_for_a_round_that_is_past_is_refused(contributor: RawContributor, delta: bytes) -> None:
    task = contributor.next_task()
    contributor.upload(delta)
    past = contributor.manifest(task, delta, server_round=spec_of(task).server_round + 7)
    receipt = contributor.submit(task.message_id, past)
    assert (receipt["verdict"], receipt["code"]) == ("refused", "stale")


def test_two_people_with_the_same_rows_may_send_the_same_bytes_in_one_round(
    hub: HubProcess, contributor: RawContributor, delta: bytes
) -> None:
    assert contributor.contribute(delta)["verdict"] == "admitted"
    friend = RawContributor(hub.address, name="friend").enrol()
    receipt = friend.contribute(delta)
    friend.close()
    assert receipt["verdict"] == "admitted"


def test_a_malformed_delta_is_refused_by_name(contributor: RawContributor, delta: bytes) -> None:
    receipt = contributor.contribute(delta[:-50])
    assert (receipt["verdict"], receipt["code"]) == ("refused", "delta-invalid")


def test_an_update_above_the_norm_cap_is_refused(
    contributor: RawContributor, tmp_path: Path, tiny_base: Path
) -> None:
    huge = random_delta(tmp_path, contributor.status.base_digest, 12345, str(tiny_base), scale=1e3)
    receipt = contributor.contribute(huge)
    assert (receipt["verdict"], receipt["code"]) == ("refused", "update-refused")
    assert "cap" in receipt["reason"]


def test_another_nodes_task_cannot_be_answered(
    hub: HubProcess, contributor: RawContributor, delta: bytes
) -> None:
    task = contributor.next_task()
    thief = RawContributor(hub.address, name="thief").enrol()
    thief.upload(delta)
    refused(ErrorCode.PERMISSION_DENIED, thief.submit, task.message_id, thief.manifest(task, delta))
    thief.close()


def test_anothers_upload_cannot_be_read(hub: HubProcess, contributor: RawContributor, delta: bytes) -> None:
    contributor.upload(delta)
    name = hashlib.sha256(delta).hexdigest()
    reader = RawContributor(hub.address, name="reader").enrol()
    begin = pb.BeginUploadRequest(sha256=name, size_bytes=len(delta))
    # The reply does not reveal that the bytes are there.
    assert not reader.call(reader.stub.BeginUpload, begin).complete
    refused(ErrorCode.NOT_FOUND, reader.download, name)
    assert contributor.download(name) == delta
    reader.close()


def test_a_variant_comes_back_as_it_was_and_to_nobody_else(
    hub: HubProcess, contributor: RawContributor, delta: bytes, tmp_path: Path
) -> None:
    (tmp_path / "delta").write_bytes(delta)
    with joined(hub, tmp_path / "ann") as ann, joined(hub, tmp_path / "bob") as bob:
        manifest = manifest_of(tmp_path / "delta", base_digest=contributor.status.base_digest)
        signed = sign_variant(ann, manifest)
        push_variant(ann, tmp_path / "delta", signed)
        found = pull_variant(ann, "", "mine", tmp_path / "in")
        assert (found.path.read_bytes(), found.signed) == (delta, signed)
        owner = ann.pin.contributor
        hidden = refused(ErrorCode.NOT_FOUND, pull_variant, bob, owner, "mine", tmp_path / "in")
        absent = refused(ErrorCode.NOT_FOUND, pull_variant, bob, owner, "none", tmp_path / "in")
        assert hidden.message.replace("mine", "none") == absent.message
        refused(ErrorCode.NOT_FOUND, contributor.download, manifest.delta_sha256)


def joined(hub: HubProcess, folder: Path) -> HubClient:
    """A client with a home and an account."""
    home, address = Home.open(folder), Address.parse(hub.address)
    client = HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False))
    enter(client, folder.name, "")
    return client


def test_every_verdict_is_in_a_ledger_that_verifies(
    hub: HubProcess, contributor: RawContributor, delta: bytes
) -> None:
    task = contributor.next_task()
    contributor.upload(delta)
    manifest = contributor.manifest(task, delta)
    forged = manifest.sign(SigningKey.generate())
    refused(ErrorCode.SIGNATURE_INVALID, contributor.submit, task.message_id, manifest, forged)
    contributor.submit(task.message_id, manifest)
    friend = RawContributor(hub.address, name="second friend").enrol()
    friend.contribute(delta)
    friend.close()
    assert hub.ask("ledger", "verify")["valid"]
    entries = [e["body"] for e in hub.ask("ledger", "show") if e["kind"] == "verdict"]
    verdicts = [
        e for e in entries if e["contributor"] in (contributor.key.contributor, friend.key.contributor)
    ]
    assert [e["verdict"] for e in verdicts] == ["refused", "admitted", "admitted"]
    assert verdicts[0]["reason"].startswith("signature-invalid")


# ---- keys that were replaced or revoked ----


def revoke(contributor: RawContributor) -> None:
    account, key = contributor.key.contributor, contributor.key
    said = Revocation(
        revoke=account,
        key=key.public_key.hex(),
        server=contributor.server,
        tls=contributor.tls,
        issued_at=int(time.time()),
    )
    request = pb.RevokeKeyRequest(
        contributor=account,
        signing_key=key.public_key,
        statement_json=said.to_json(),
        signature=said.sign(key),
    )
    contributor.stub.RevokeKey(request, timeout=SECONDS)


def test_an_upload_ends_at_the_next_chunk_after_its_key_was_revoked(
    hub: HubProcess, contributor: RawContributor
) -> None:
    data, sent = bytes(3 * PART), []
    name = hashlib.sha256(data).hexdigest()
    contributor.call(contributor.stub.BeginUpload, pb.BeginUploadRequest(sha256=name, size_bytes=len(data)))

    def revoked_on_the_way() -> Iterator[pb.UploadChunk]:
        for chunk in chunks(name, data, size=PART):
            if len(sent) == 1:
                revoke(contributor)
            sent.append(chunk.offset)
            yield chunk

    refused(ErrorCode.KEY_REVOKED, contributor.call, contributor.stub.Upload, revoked_on_the_way())
    refused(ErrorCode.KEY_REVOKED, contributor.call, contributor.stub.Account, pb.AccountRequest())
    refused(ErrorCode.KEY_REVOKED, contributor.enrol)
    witness = RawContributor(hub.address, "witness").enrol()
    stream = witness.stub.Ledger(pb.LedgerRequest(), timeout=SECONDS, metadata=witness.metadata)
    entries = [entry for entry in stream if contributor.key.contributor in entry.body_json]
    witness.close()
    assert [entry.kind for entry in entries] == ["enrolled", "revoked", "verdict"]
    assert "key-revoked: Upload with a revoked key" in entries[-1].body_json


def test_an_update_signed_by_a_replaced_key_is_refused_and_the_new_key_answers_the_task(
    contributor: RawContributor, delta: bytes
) -> None:
    task, account, old = contributor.next_task(), contributor.key.contributor, contributor.key
    contributor.upload(delta)
    manifest = contributor.manifest(task, delta)
    new = SigningKey.generate()
    said = Rotation(
        rotate=account,
        new_key=new.public_key.hex(),
        server=contributor.server,
        tls=contributor.tls,
        issued_at=int(time.time()),
    )
    request = pb.RotateKeyRequest(
        new_public_key=new.public_key,
        statement_json=said.to_json(),
        signature=said.sign(old),
        new_signature=said.sign(new),
    )
    contributor.stub.RotateKey(request, timeout=SECONDS)
    refused(ErrorCode.UNAUTHENTICATED, contributor.submit, task.message_id, manifest)
    contributor.key = new.of_account(account)
    contributor.enrol()
    late = manifest.sign(old)
    refused(ErrorCode.SIGNATURE_INVALID, contributor.submit, task.message_id, manifest, late)
    receipt = contributor.submit(task.message_id, contributor.manifest(task, delta))
    assert receipt["verdict"] == "admitted"


def test_a_transfer_of_what_nobody_has_is_refused_over_the_wire(contributor: RawContributor) -> None:
    order = TransferOrder(
        sender=contributor.key.contributor,
        to="c00000000000000000000000000000000",
        amount=1,
        server=contributor.server,
        tls=contributor.tls,
        issued_at=int(time.time()),
    )
    request = pb.TransferRequest(statement_json=order.to_json(), signature=order.sign(contributor.key))
    refused(ErrorCode.TRANSFER_REFUSED, contributor.call, contributor.stub.Transfer, request)
    account = contributor.call(contributor.stub.Account, pb.AccountRequest())
    assert json.loads(account.rewards_json)["available"] == 0
