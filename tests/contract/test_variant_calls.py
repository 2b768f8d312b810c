"""Variants at a hub over gRPC with TLS: what is kept and given back, what is refused, what the ledger says of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.hub.rotation import revoke, rotate
from gym_client.hub.transfers import ObjectCache, download, upload
from gym_client.hub.transport import HubClient
from gym_client.ledger.rewards import verify_online
from gym_client.variants import (
    get_variant,
    list_variants,
    pull_variant,
    push_variant,
    remove_variant,
    sign_variant,
    to_push,
)

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.variant import SignedVariant
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import SPEC, LoopbackHub, forged, manifest_of, some_delta
from tests.support.quick import quick


@pytest.fixture(scope="module", params=quick(["sqlite", "postgresql"], "sqlite"))
def hub(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LoopbackHub]:
    limits = {"max_per_contributor": 3, "max_bytes": 8192, "max_total_bytes": 1 << 20}
    url = "sqlite:///hub.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").new_database()
    folder = tmp_path_factory.mktemp("variants") / "hub"
    hub = LoopbackHub(folder, variants=limits, storage={"database": url})
    yield hub
    hub.close()


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A delta that no other test has."""
    return some_delta(tmp_path, seed=int.from_bytes(str(tmp_path).encode(), "little") % 2**40)


def pushed(client: HubClient, delta: Path, readers: list[str] | None = None, **said: Any) -> SignedVariant:
    signed = sign_variant(client, manifest_of(delta, **said))
    push_variant(client, delta, signed, readers)
    return signed


def refused(code: ErrorCode, function: Any, *arguments: Any, **named: Any) -> GymError:
    with pytest.raises(GymError) as caught:
        function(*arguments, **named)
    assert caught.value.code is code, caught.value
    return caught.value


def test_what_is_pushed_is_pulled_bit_for_bit_with_its_signature(
    hub: LoopbackHub, ann: HubClient, delta: Path, tmp_path: Path
) -> None:
    signed = pushed(ann, delta)
    steps: list[str] = []
    found = pull_variant(ann, "", "mine", tmp_path / "in", lambda what, done, total: steps.append(what))
    assert found.path.read_bytes() == delta.read_bytes()
    assert found.signed == signed
    assert {"ledger", "fetch"} <= set(steps)
    entry = next(e for e in hub.fed.ledger.entries() if e.sequence == found.ledger_sequence)
    assert (entry.kind, entry.body["document"]) == ("variant", signed.digest)
    assert "mine" not in entry.body_json, "the ledger is everyone's, a variant's name is not"
    hub.fed.ledger.verify()
    assert verify_online(ann.home, ann).receipts == 1, "the receipt of the push is checked against the ledger"


def test_anothers_variant_is_as_unknown_as_one_that_does_not_exist(
    ann: HubClient, bob: HubClient, delta: Path, tmp_path: Path
) -> None:
    pushed(ann, delta)
    owner = ann.pin.contributor
    hidden = refused(ErrorCode.NOT_FOUND, get_variant, bob, owner, "mine")
    absent = refused(ErrorCode.NOT_FOUND, get_variant, bob, owner, "none")
    assert hidden.message.replace("mine", "none") == absent.message
    assert hidden.hint == absent.hint
    assert list(list_variants(bob)) == []
    sha256, size = manifest_of(delta).delta_sha256, delta.stat().st_size
    (tmp_path / "in").mkdir()
    refused(ErrorCode.NOT_FOUND, download, bob, ObjectCache(tmp_path / "in"), sha256, size)
    state = bob.call("BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=size))
    assert not state.complete, "the hub reports to nobody that it has these bytes"


def test_knowing_a_hash_does_not_make_one_an_owner(ann: HubClient, bob: HubClient, delta: Path) -> None:
    pushed(ann, delta)
    claim = sign_variant(bob, manifest_of(delta, "stolen"))
    reply = bob.call("PutVariant", pb.PutVariantRequest(variant_json=claim.to_json()))
    assert reply.needs_object, "who names bytes has to send them"


def test_readers_are_those_whom_the_owner_names(
    ann: HubClient, bob: HubClient, delta: Path, hub: LoopbackHub, tmp_path: Path
) -> None:
    signed = pushed(ann, delta, [bob.pin.contributor])
    shown = get_variant(bob, ann.pin.contributor, "mine")
    assert (shown.readers, shown.num_readers) == ((), 0), "who else may read it is the owner's to know"
    assert get_variant(ann, "", "mine").readers == (bob.pin.contributor,)
    assert [v.signed for v in list_variants(bob)] == [signed]
    assert pull_variant(bob, ann.pin.contributor, "mine", tmp_path / "in").signed == signed
    with hub.client(tmp_path / "cat") as cat:
        refused(ErrorCode.NOT_FOUND, get_variant, cat, ann.pin.contributor, "mine")
        push_variant(ann, delta, signed, ["*"])
        assert get_variant(cat, ann.pin.contributor, "mine").is_public
        assert get_variant(ann, "", "mine").num_readers == 0, "nobody was named"
        push_variant(ann, delta, signed)
        assert get_variant(cat, ann.pin.contributor, "mine").is_public, "unsaid, readers stay as they are"
        push_variant(ann, delta, signed, [])
        refused(ErrorCode.NOT_FOUND, get_variant, cat, ann.pin.contributor, "mine")
        refused(ErrorCode.NOT_FOUND, cat.call, "GetVariant", pb.GetVariantRequest(owner="", name="mine"))
    refused(ErrorCode.NOT_FOUND, push_variant, ann, delta, signed, ["c" + "1" * 32])


def test_a_push_that_broke_off_is_repeated_with_one_entry_in_the_ledger(
    hub: LoopbackHub, ann: HubClient, tmp_path: Path
) -> None:
    delta = some_delta(tmp_path, seed=71)
    signed = sign_variant(ann, manifest_of(delta))
    assert ann.call("PutVariant", pb.PutVariantRequest(variant_json=signed.to_json())).needs_object
    sha256, half = signed.manifest.delta_sha256, delta.stat().st_size // 2
    ann.call("BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=signed.manifest.size_bytes))
    chunk = pb.UploadChunk(sha256=sha256, offset=0, data=delta.read_bytes()[:half])
    assert ann.call("Upload", lambda: iter([chunk])).offset == half
    begun: list[int] = []
    push_variant(ann, delta, signed, progress=lambda what, done, total: begun.append(done))
    assert begun[0] == half, "the upload goes on where it stopped"
    before = hub.fed.ledger.newest_head()
    again = to_push(ann, manifest_of(delta, issued_at=1))
    assert again == signed, "what the hub holds says the same: nothing new is signed"
    first, second = push_variant(ann, delta, again), push_variant(ann, delta, again)
    assert first["proof"]["entry"] == second["proof"]["entry"]
    assert hub.fed.ledger.newest_head() == before


def test_an_upload_whose_end_a_kill_cut_off_needs_no_byte_more(
    hub: LoopbackHub, ann: HubClient, tmp_path: Path
) -> None:
    delta = some_delta(tmp_path, seed=72)
    signed = sign_variant(ann, manifest_of(delta))
    sha256, size = signed.manifest.delta_sha256, signed.manifest.size_bytes
    ann.call("BeginUpload", pb.BeginUploadRequest(sha256=sha256, size_bytes=size))
    hub.fed.store.part_path(ann.pin.contributor, sha256).write_bytes(delta.read_bytes())
    begun: list[int] = []
    push_variant(ann, delta, signed, progress=lambda what, done, total: begun.append(done))
    assert begun == [size]


def test_variants_of_one_account_are_limited_by_their_bytes_too(tmp_path: Path) -> None:
    first, second = some_delta(tmp_path, seed=1), some_delta(tmp_path, seed=2)
    size = first.stat().st_size
    hub = LoopbackHub(tmp_path / "hub", variants={"max_bytes_per_contributor": 2 * size - 1})
    with hub.client(tmp_path / "ann") as ann, hub.client(tmp_path / "bob") as bob:
        pushed(ann, first, name="one")
        error = refused(ErrorCode.TOO_LARGE, pushed, ann, second, name="two")
        assert f"has {size:,} bytes in 1 variant on this hub; the {size:,} bytes of two" in error.message
        assert "variants.max_bytes_per_contributor" in error.message
        assert "gym variant hub remove" in error.hint
        pushed(ann, second, name="one", revision=2)  # takes the first one's place
        pushed(bob, first, name="one")
    hub.close()


def test_a_newer_revision_takes_the_place_and_no_older_one_comes_back(
    ann: HubClient, delta: Path, tmp_path: Path
) -> None:
    first = pushed(ann, delta)
    other = some_delta(tmp_path, seed=3)
    second = pushed(ann, other, revision=5)
    assert get_variant(ann, "", "mine").signed == second
    refused(ErrorCode.STALE, push_variant, ann, delta, first)
    between = sign_variant(ann, manifest_of(delta, revision=4))
    refused(ErrorCode.STALE, push_variant, ann, delta, between)
    same = sign_variant(ann, manifest_of(delta, revision=5))
    assert "revision 6" in refused(ErrorCode.REPLAYED, push_variant, ann, delta, same).hint
    remove_variant(ann, "mine")
    refused(ErrorCode.REPLAYED, push_variant, ann, other, second)
    pushed(ann, other, revision=6)


def test_a_removed_variant_is_gone_for_everyone_and_the_ledger_says_so(
    hub: LoopbackHub, ann: HubClient, bob: HubClient, delta: Path, tmp_path: Path
) -> None:
    signed = pushed(ann, delta, ["*"])
    receipt = remove_variant(ann, "mine")
    assert remove_variant(ann, "mine") == receipt, "a removal that was cut short can be repeated"
    (tmp_path / "in").mkdir()
    for client in (ann, bob):
        refused(ErrorCode.NOT_FOUND, get_variant, client, ann.pin.contributor, "mine")
        size = signed.manifest.size_bytes
        cache = ObjectCache(tmp_path / "in")
        refused(ErrorCode.NOT_FOUND, download, client, cache, signed.manifest.delta_sha256, size)
    refused(ErrorCode.NOT_FOUND, remove_variant, bob, "mine")
    assert hub.fed.ledger.verify()["variants"] >= 1


def test_two_owners_of_the_same_bytes_do_not_take_them_from_each_other(
    ann: HubClient, bob: HubClient, delta: Path, tmp_path: Path
) -> None:
    pushed(ann, delta)
    pushed(bob, delta)
    remove_variant(ann, "mine")
    assert pull_variant(bob, "", "mine", tmp_path / "in").path.read_bytes() == delta.read_bytes()


def test_the_coordinator_takes_a_variant_down_with_a_reason(
    hub: LoopbackHub, ann: HubClient, delta: Path
) -> None:
    pushed(ann, delta)
    hub.fed.variants.remove(ann.pin.contributor, "mine", "coordinator", "against the rules")
    refused(ErrorCode.NOT_FOUND, get_variant, ann, "", "mine")
    body = list(hub.fed.ledger.entries())[-1].body
    assert (body["by"], body["reason"]) == ("coordinator", "against the rules")


def test_what_was_taken_down_is_not_put_again_until_it_is_allowed(
    hub: LoopbackHub, ann: HubClient, bob: HubClient, delta: Path, tmp_path: Path
) -> None:
    pushed(ann, delta)
    owner = ann.pin.contributor
    refused(ErrorCode.NOT_FOUND, hub.fed.variants.allow, owner, "mine")
    hub.fed.variants.remove(owner, "mine", "coordinator", "against the rules")
    other = some_delta(tmp_path, seed=81)
    for said in (
        manifest_of(delta, revision=2),
        manifest_of(delta, "renamed"),
        manifest_of(other, revision=2),
    ):
        error = refused(ErrorCode.PERMISSION_DENIED, put, ann, sign_variant(ann, said))
        assert "against the rules" in error.message
    pushed(ann, other, name="another")
    pushed(bob, delta)
    hub.fed.variants.allow(owner, "mine")
    pushed(ann, delta, revision=2)


# ---- refusals, each before a byte is sent ----


def put(client: HubClient, signed: SignedVariant) -> Any:
    return client.call("PutVariant", pb.PutVariantRequest(variant_json=signed.to_json()))


def test_an_unsigned_variant_is_refused(ann: HubClient, delta: Path) -> None:
    refused(ErrorCode.SIGNATURE_INVALID, put, ann, forged(sign_variant(ann, manifest_of(delta))))


def test_a_variant_in_anothers_name_is_refused(ann: HubClient, bob: HubClient, delta: Path) -> None:
    refused(ErrorCode.PERMISSION_DENIED, put, bob, sign_variant(ann, manifest_of(delta)))
    posing = manifest_of(delta, owner=ann.pin.contributor)
    refused(ErrorCode.SIGNATURE_INVALID, put, ann, SignedVariant.sign(posing, bob.home.key))


def test_a_variant_for_another_base_is_refused_with_the_end_of_the_list(ann: HubClient, delta: Path) -> None:
    other = "sha256:" + "cd" * 32
    error = refused(
        ErrorCode.BASE_MISMATCH, put, ann, sign_variant(ann, manifest_of(delta, base_digest=other))
    )
    assert SPEC.digest in error.message
    assert "no version yet" in error.message


def test_a_delta_for_another_base_than_its_manifest_says_is_refused(ann: HubClient, tmp_path: Path) -> None:
    path = some_delta(tmp_path, 9, "sha256:" + "cd" * 32)
    refused(ErrorCode.BASE_MISMATCH, push_variant, ann, path, sign_variant(ann, manifest_of(path)))


def test_bytes_that_are_no_delta_are_refused(ann: HubClient, tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.write_bytes(b"no delta at all" * 9)
    refused(ErrorCode.DELTA_INVALID, push_variant, ann, path, sign_variant(ann, manifest_of(path)))


def test_a_size_that_is_not_the_objects_is_refused(ann: HubClient, delta: Path) -> None:
    signed = sign_variant(ann, manifest_of(delta, size_bytes=99))
    upload(ann, signed.manifest.delta_sha256, delta)
    refused(ErrorCode.DELTA_INVALID, put, ann, signed)


def test_a_variant_over_the_limits_is_refused(hub: LoopbackHub, ann: HubClient, delta: Path) -> None:
    large = sign_variant(ann, manifest_of(delta, size_bytes=8193))
    assert "8192" in refused(ErrorCode.TOO_LARGE, put, ann, large).message
    for name in ("one", "two", "three"):
        pushed(ann, delta, name=name)
    fourth = refused(ErrorCode.TOO_LARGE, put, ann, sign_variant(ann, manifest_of(delta, "four")))
    assert "gym variant hub remove" in fourth.hint
    pushed(ann, delta, name="one", revision=2)


def test_a_hub_keeps_no_more_than_it_has_room_for_and_none_where_it_keeps_none(
    tmp_path: Path, delta: Path
) -> None:
    size = delta.stat().st_size
    narrow = LoopbackHub(tmp_path / "hub", variants={"max_total_bytes": size + 1, "max_changes_per_hour": 4})
    try:
        with narrow.client(tmp_path / "ann") as ann:
            pushed(ann, delta)
            full = refused(ErrorCode.TOO_LARGE, put, ann, sign_variant(ann, manifest_of(delta, "two")))
            assert "variants.max_total_bytes" in full.hint
            assert str(size + 1) not in full.message, "how much the others have is theirs to know"
            remove_variant(ann, "mine")
            pushed(ann, delta, name="two")
            pushed(ann, delta, name="two", revision=2)
            late = sign_variant(ann, manifest_of(delta, "two", revision=3))
            assert "minutes" in refused(ErrorCode.BUSY, put, ann, late).hint
            remove_variant(ann, "two")
    finally:
        narrow.close()
    closed = LoopbackHub(tmp_path / "closed", variants={"enabled": False})
    try:
        with closed.client(tmp_path / "bob") as bob:
            refused(ErrorCode.PERMISSION_DENIED, put, bob, sign_variant(bob, manifest_of(delta)))
    finally:
        closed.close()


def test_a_variant_from_the_future_is_refused(ann: HubClient, delta: Path) -> None:
    ahead = manifest_of(delta, owner=ann.pin.contributor, issued_at=2**40)
    late = refused(ErrorCode.CLOCK_SKEWED, put, ann, SignedVariant.sign(ahead, ann.home.key))
    assert "gym variant push" in late.hint


def test_a_replaced_key_puts_nothing_new_and_what_it_signed_stays_good(
    ann: HubClient, bob: HubClient, delta: Path, tmp_path: Path, hub: LoopbackHub
) -> None:
    signed = pushed(ann, delta, ["*"])
    late = sign_variant(ann, manifest_of(delta, revision=2))
    rotate(ann.home)
    with hub.client(ann.home.folder) as again:
        refused(ErrorCode.KEY_REVOKED, put, again, late)
        owner = again.pin.contributor
        assert pull_variant(bob, owner, "mine", tmp_path / "in").signed == signed
        newer = to_push(again, manifest_of(delta, revision=2), late)
        assert newer.public_key != signed.public_key
        push_variant(again, delta, newer)
        assert pull_variant(bob, owner, "mine", tmp_path / "in").signed == newer


def test_what_a_revoked_key_signed_is_not_given_out(
    hub: LoopbackHub, ann: HubClient, bob: HubClient, delta: Path, tmp_path: Path
) -> None:
    signed = pushed(ann, delta, ["*"])
    revoke(ann.home)
    refused(ErrorCode.KEY_REVOKED, put, ann, signed)
    refused(ErrorCode.KEY_REVOKED, pull_variant, bob, ann.pin.contributor, "mine", tmp_path / "in")
    assert [v.key_status for v in list_variants(bob) if v.signed == signed] == ["revoked"]
