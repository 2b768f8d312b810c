"""The variant store: addition, replacement and removal with their permissions, and checks before use."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.serving.store.bulk import IncomingVariant
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import SignedVariant
from tests.support.small_variants import fake_loader, signed_small_delta, small_base, small_delta

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
OWNER = KEY.contributor


def open_store(folder: Path, **options: object) -> VariantStore:
    return VariantStore.open(folder, base=small_base(), loader=fake_loader, **options)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VariantStore]:
    with open_store(tmp_path / "store") as opened:
        yield opened


def add(
    store: VariantStore, tmp_path: Path, name: str = "alice", revision: int = 1, **options: object
) -> str:
    """Add KEY's variant; its delta depends on the revision. Returns the sha256."""
    delta, signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, name, revision=revision, seed=revision)
    arguments = {"owner": OWNER, **options}
    return store.add(delta, signed, name=name, **arguments).sha256  # type: ignore[arg-type]


def refusal(code: ErrorCode, call: object, *arguments: object, **options: object) -> str:
    with pytest.raises(GymError) as caught:
        call(*arguments, **options)  # type: ignore[operator]
    assert caught.value.code is code, caught.value
    return str(caught.value)


def served(store: VariantStore, name: str = "alice") -> str:
    """Sha256 of what a request would get."""
    variant = store.acquire(name)
    store.release(variant)
    return variant.delta_sha256


def test_a_variant_that_was_added_is_served_and_listed(store: VariantStore, tmp_path: Path) -> None:
    sha256 = add(store, tmp_path)
    record = store.get("alice")
    assert (record.owner, record.sha256, record.revision, record.base_model) == (OWNER, sha256, 1, "small")
    assert store.path("alice").read_bytes() == (tmp_path / "x.gymdelta").read_bytes()
    assert served(store) == sha256
    assert store.verify("alice") == record


def test_another_process_adds_replaces_and_removes_and_a_running_server_sees_it(
    store: VariantStore, tmp_path: Path
) -> None:
    with VariantStore.open(store.folder) as registry:
        refusal(ErrorCode.NOT_FOUND, store.poll, "alice")
        first = add(registry, tmp_path)
        assert served(store) == first
        second = add(registry, tmp_path, revision=2, replace=True)
        assert second != first
        assert served(store) == second
        registry.remove("alice")
        refusal(ErrorCode.NOT_FOUND, store.poll, "alice")
    assert store.stats().resident == 0


def test_a_variant_in_use_outlives_its_removal_and_new_requests_find_nothing(
    store: VariantStore, tmp_path: Path
) -> None:
    add(store, tmp_path)
    variant = store.acquire("alice")
    store.remove("alice")
    assert "no variant 'alice'" in refusal(ErrorCode.NOT_FOUND, store.acquire, "alice")
    assert (store.stats().resident, store.stats().pinned) == (1, 1)
    store.release(variant)
    assert (store.stats().resident, store.stats().resident_bytes) == (0, 0)
    assert list(store.folder.glob("objects/*/*")) == []


def test_a_replaced_variant_goes_with_its_last_use_and_new_requests_get_the_new_one(
    store: VariantStore, tmp_path: Path
) -> None:
    add(store, tmp_path)
    old = store.acquire("alice")
    new = add(store, tmp_path, revision=2, replace=True)
    assert served(store) == new
    assert store.stats().resident == 2
    store.release(old)
    assert store.stats().resident == 1
    assert "released more often" in refusal(ErrorCode.USAGE, store.release, old)
    store.history.keep(1)
    store.gc()
    assert [path.stem for path in store.folder.glob("objects/*/*")] == [new]


def test_two_variants_of_the_same_bytes_share_a_file_until_the_last_is_removed(
    store: VariantStore, tmp_path: Path
) -> None:
    delta = small_delta(tmp_path / "x.gymdelta")
    for name in ("ann", "bob"):
        store.add(delta, sign_variant(delta, KEY, name=name), name=name, owner=OWNER)
    store.remove("ann")
    assert served(store, "bob") == store.get("bob").sha256
    store.remove("bob")
    assert list(store.folder.glob("objects/*/*")) == []


def test_two_variants_of_the_same_bytes_share_their_memory_and_each_must_be_signed(
    store: VariantStore, tmp_path: Path
) -> None:
    sha256 = add(store, tmp_path, "alice")
    assert add(store, tmp_path, "bob") == sha256
    alice, bob = store.acquire("alice"), store.acquire("bob")
    assert alice is bob
    assert (store.stats().resident, store.stats().loads) == (1, 1)
    update(store.folder, "manifest", "{}")
    refusal(ErrorCode.SIGNATURE_INVALID, store.acquire, "alice")
    refusal(ErrorCode.SIGNATURE_INVALID, store.acquire, "bob")


def test_only_a_higher_revision_replaces_a_signed_variant(store: VariantStore, tmp_path: Path) -> None:
    add(store, tmp_path, revision=2)
    assert "exists" in refusal(ErrorCode.FILE_EXISTS, add, store, tmp_path, revision=3)
    assert "older" in refusal(ErrorCode.STALE, add, store, tmp_path, revision=1, replace=True)
    delta, signed = signed_small_delta(tmp_path / "y.gymdelta", KEY, "alice", revision=2, seed=9)
    refusal(ErrorCode.REPLAYED, store.add, delta, signed, name="alice", owner=OWNER, replace=True)
    with open_store(store.folder, require_signature=False) as lax:
        refusal(ErrorCode.SIGNATURE_INVALID, lax.add, delta, name="alice", owner=OWNER, replace=True)
    assert store.get("alice").revision == 2


def test_anothers_name_cannot_be_taken(store: VariantStore, tmp_path: Path) -> None:
    add(store, tmp_path)
    delta, signed = signed_small_delta(tmp_path / "y.gymdelta", OTHER, "alice", revision=2)
    refusal(
        ErrorCode.PERMISSION_DENIED,
        store.add,
        delta,
        signed,
        name="alice",
        owner=OTHER.contributor,
        replace=True,
    )
    refusal(ErrorCode.SIGNATURE_INVALID, store.add, delta, signed, name="alice", owner=OWNER, replace=True)


def test_the_same_manifest_given_again_repairs_its_file(store: VariantStore, tmp_path: Path) -> None:
    delta, signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, "alice")
    before = store.add(delta, signed, name="alice", owner=OWNER)
    flip(store.path("alice"), -1)
    refusal(ErrorCode.HASH_MISMATCH, store.verify, "alice")
    assert store.add(delta, signed, name="alice", owner=OWNER, replace=True) == before
    assert store.verify("alice") == before


def test_what_is_not_what_was_signed_is_refused_at_the_door(store: VariantStore, tmp_path: Path) -> None:
    delta, signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, "alice")
    refusal(ErrorCode.SIGNATURE_INVALID, store.add, delta, signed, name="bob", owner=OWNER)
    other = small_delta(tmp_path / "y.gymdelta", seed=5)
    refusal(ErrorCode.HASH_MISMATCH, store.add, other, signed, name="alice", owner=OWNER)
    refusal(ErrorCode.SIGNATURE_INVALID, store.add, delta, name="alice", owner=OWNER)
    refusal(ErrorCode.USAGE, store.add, delta, signed, name="a:b", owner=OWNER)
    refusal(ErrorCode.USAGE, store.add, delta, signed, name="alice", owner="a b")
    foreign = small_delta(tmp_path / "z.gymdelta", base=small_base("b"))
    message = refusal(
        ErrorCode.BASE_MISMATCH,
        store.add,
        foreign,
        sign_variant(foreign, KEY, name="alice"),
        name="alice",
        owner=OWNER,
    )
    assert "z.gymdelta" in message
    torn = tmp_path / "torn.gymdelta"
    torn.write_bytes(delta.read_bytes()[:-1])
    with open_store(store.folder, require_signature=False) as lax:
        assert "torn.gymdelta" in refusal(ErrorCode.DELTA_INVALID, lax.add, torn, name="alice", owner=OWNER)
    for absent in (tmp_path / "no", tmp_path):
        message = refusal(ErrorCode.FILE_NOT_FOUND, store.add, absent, signed, name="alice", owner=OWNER)
        assert str(absent) in message
    assert list(store.list()) == []
    assert [path for path in store.folder.rglob("*") if path.suffix in (".gymdelta", ".partial")] == []


def test_a_plain_user_is_bound_to_the_first_key_and_trusted_ones(store: VariantStore, tmp_path: Path) -> None:
    add(store, tmp_path, owner="ann")
    delta, signed = signed_small_delta(tmp_path / "y.gymdelta", OTHER, "second", seed=9)
    message = refusal(ErrorCode.SIGNATURE_INVALID, store.add, delta, signed, name="second", owner="ann")
    assert f"gym variant trust ann {OTHER.public_key.hex()}" in message
    store.trust("ann", OTHER.public_key)
    store.add(delta, signed, name="second", owner="ann")
    assert served(store, "second") == store.get("second").sha256


def test_a_rotated_key_signs_where_the_store_knows_it_and_a_revoked_one_nowhere(
    store: VariantStore, tmp_path: Path
) -> None:
    newer = OTHER.of_account(OWNER)
    delta, signed = signed_small_delta(tmp_path / "x.gymdelta", newer, "alice")
    refusal(ErrorCode.SIGNATURE_INVALID, store.add, delta, signed, name="alice", owner=OWNER)
    store.trust(OWNER, OTHER.public_key)
    store.add(delta, signed, name="alice", owner=OWNER)
    assert served(store) == store.get("alice").sha256
    store.revoke(OWNER, OTHER.public_key)
    for call in (store.verify, store.acquire):  # also where it is in memory
        assert "variant 'alice'" in refusal(ErrorCode.KEY_REVOKED, call, "alice")
    refusal(ErrorCode.KEY_REVOKED, store.trust, OWNER, OTHER.public_key)
    signed = sign_variant(delta, newer, name="again")
    refusal(ErrorCode.KEY_REVOKED, store.add, delta, signed, name="again", owner=OWNER)


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 9, 200, 448, 460, -1])
def test_a_flipped_byte_of_a_delta_is_found_before_use(store: VariantStore, tmp_path: Path, at: int) -> None:
    add(store, tmp_path)
    flip(store.path("alice"), at)
    for call in (store.acquire, store.verify):
        message = refusal(ErrorCode.HASH_MISMATCH, call, "alice")
        assert "variant 'alice'" in message
        assert str(store.path("alice")) in message
        assert "gym variant add --replace" in message


def test_a_change_that_keeps_size_and_time_is_found_too(store: VariantStore, tmp_path: Path) -> None:
    add(store, tmp_path)
    assert served(store)
    store._cache.retire("alice")
    path = store.path("alice")
    before = path.stat()
    flip(path, -1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    refusal(ErrorCode.HASH_MISMATCH, store.acquire, "alice")


def test_a_file_is_hashed_once_while_it_does_not_change(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_fed.serving.store import objects

    add(store, tmp_path)
    hashed: list[Path] = []
    real = objects._hash
    monkeypatch.setattr(objects, "_hash", lambda path: hashed.append(path) or real(path))
    with open_store(store.folder) as other:
        for _ in range(3):
            served(other)
            other._cache.retire("alice")
        assert len(hashed) == 1
        path = other.path("alice")
        path.write_bytes(path.read_bytes())  # the same bytes: hashed again, and good
        served(other)
        assert len(hashed) == 2
        assert other.stats().loads == 4


def update(folder: Path, column: str, value: object) -> None:
    connection = sqlite3.connect(folder / "variants.db")
    connection.execute(f"UPDATE variants SET {column} = ?", (value,))
    connection.commit()
    connection.close()


def test_every_flipped_character_of_a_manifest_is_found(store: VariantStore, tmp_path: Path) -> None:
    add(store, tmp_path)
    good = store.get("alice").manifest
    assert good is not None
    for at in range(0, len(good), 7):
        update(store.folder, "manifest", good[:at] + chr(ord(good[at]) ^ 1) + good[at + 1 :])
        message = refusal(ErrorCode.SIGNATURE_INVALID, store.verify, "alice")
        assert "variant 'alice'" in message, at
    update(store.folder, "manifest", good)
    store.verify("alice")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param("owner", OTHER.contributor, id="owner-another-account"),
        ("owner", "ann"),
        ("sha256", "0" * 64),
        ("size_bytes", 7),
        ("base_model", "other"),
        ("base_digest", "sha256:" + "b" * 64),
        ("revision", 9),
        ("note", "other"),
        ("name", "bob"),
        ("manifest", None),
    ],
)
def test_a_row_that_differs_from_what_its_owner_signed_is_refused(
    store: VariantStore, tmp_path: Path, column: str, value: object
) -> None:
    add(store, tmp_path)
    assert served(store)  # it is in memory, and that does not help
    update(store.folder, column, value)
    name = "bob" if column == "name" else "alice"
    refusal(ErrorCode.SIGNATURE_INVALID, store.acquire, name)


def test_a_variant_of_another_base_is_registered_without_a_base_and_not_served(
    store: VariantStore, tmp_path: Path
) -> None:
    delta, signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, "alice", base=small_base("b"))
    with VariantStore.open(store.folder) as registry:
        registry.add(delta, signed, name="alice", owner=OWNER)
        registry.verify("alice")
        refusal(ErrorCode.USAGE, registry.poll, "alice")
    message = refusal(ErrorCode.BASE_MISMATCH, store.acquire, "alice")
    assert "variant 'alice'" in message
    assert "gym variant rebase" in message


def test_an_unsigned_variant_is_served_only_where_that_is_allowed(tmp_path: Path) -> None:
    delta = small_delta(tmp_path / "x.gymdelta")
    with open_store(tmp_path / "store", require_signature=False) as lax:
        lax.add(delta, name="alice", owner="ann", note="by hand")
        assert lax.add(delta, name="alice", owner="ann", replace=True).revision == 2
        assert served(lax)
    with open_store(tmp_path / "store") as strict:
        assert "--sign" in refusal(ErrorCode.SIGNATURE_INVALID, strict.acquire, "alice")


def test_a_lost_file_is_named(store: VariantStore, tmp_path: Path) -> None:
    delta, signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, "alice")
    store.add(delta, signed, name="alice", owner=OWNER)
    path = store.path("alice")
    path.unlink()
    message = refusal(ErrorCode.FILE_NOT_FOUND, store.acquire, "alice")
    assert str(path) in message
    # The same manifest, signed once: another one of a later second is another manifest.
    store.add(delta, signed, name="alice", owner=OWNER, replace=True)
    assert served(store)  # at once, though the failure was just reported


def test_a_variant_in_a_codec_that_is_not_installed_names_that_remedy(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, tmp_path)
    monkeypatch.setattr("gym_fed.delta.file.CODECS.names", lambda: ("dense_of_old",))
    with pytest.raises(GymError, match=r"variant 'alice'.*unknown codec") as caught:
        store.acquire("alice")
    assert caught.value.hint == "install the package that provides the codec"


def test_leftovers_are_collected_and_copies_under_way_are_not(store: VariantStore, tmp_path: Path) -> None:
    kept = add(store, tmp_path)
    orphan = store.folder / "objects" / "00" / f"{'0' * 64}.gymdelta"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"12345")
    fresh, old = (store.folder / "staging" / f"{name}.partial" for name in ("fresh", "old"))
    for path in (fresh, old):
        path.write_bytes(b"1")
    os.utime(old, (time.time() - 4000,) * 2)
    assert store.gc() == (2, 6)
    assert fresh.exists()
    assert store.path("alice").stem == kept
    assert served(store) == kept


def test_some_hundred_variants_are_listed_by_name_and_by_owner(tmp_path: Path) -> None:
    delta = small_delta(tmp_path / "x.gymdelta")
    names = [f"v{number:03d}" for number in range(520)]  # more than a page
    with open_store(tmp_path / "store", require_signature=False) as store:
        store.add(delta, name=names[0], owner="u0")
        row = store.get(names[0])
        with store._registry.writing() as transaction:
            for number, name in enumerate(names):
                transaction.put(type(row)(**{**vars(row), "name": name, "owner": f"u{number % 2}"}))
        assert [record.name for record in store.list()] == names
        assert [record.name for record in store.list("u1")] == names[1::2]
        assert store.count() == 520
        assert served(store, names[-1]) == row.sha256


@pytest.mark.slow  # the quick suite does the same with some hundred
def test_ten_thousand_variants_are_served_in_the_memory_of_a_hundred(tmp_path: Path) -> None:
    import psutil

    count, files = 10_000, 401
    with VariantStore.open(tmp_path / "store") as store:
        deltas = [small_delta(tmp_path / f"{number}.gymdelta", number) for number in range(files)]
        store.add_all(
            [IncomingVariant(delta, f"f{number}", OWNER) for number, delta in enumerate(deltas)], KEY
        )
        rows = [store.get(f"f{number}") for number in range(files)]
        with store._registry.writing() as transaction:
            for number in range(count):
                row, name = rows[number % files], f"v{number:05d}"
                signed = sign_variant_again(row, name)
                changes = {"name": name, "manifest": signed.to_json()}
                transaction.put(type(row)(**{**vars(row), **changes}))
    with open_store(tmp_path / "store", cache_bytes=100 * rows[0].size_bytes) as store:
        served(store, "v00000")
        before = psutil.Process().memory_info().rss
        for number in range(0, count, 10):
            assert served(store, f"v{number:05d}") == rows[number % files].sha256
        assert psutil.Process().memory_info().rss - before < 16 << 20
        stats = store.stats()
        assert (stats.resident, stats.resident_bytes) == (100, 100 * rows[0].size_bytes)
        assert stats.misses == 1000  # every name is new; a few find a file that stayed
        assert 900 < stats.loads <= 1000
        assert store.count() == count + files


def sign_variant_again(row: VariantRecord, name: str) -> SignedVariant:
    signed = row.signed()
    assert signed is not None
    return SignedVariant.sign(signed.manifest.model_copy(update={"variant": name}), KEY)


def test_a_store_is_for_its_owners_eyes_and_names_what_is_wrong_with_its_database(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    refusal(ErrorCode.FILE_NOT_FOUND, VariantStore.open, folder, create=False)
    VariantStore.open(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "variants.db").stat().st_mode & 0o777 == 0o600
    (folder / "variants.db").write_bytes(b"no database" * 100)
    assert "variants.db" in refusal(ErrorCode.STATE_CORRUPT, VariantStore.open, folder)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("owner", b"\xff"),
        ("sha256", "../../etc/passwd"),
        ("size_bytes", "x"),
        ("size_bytes", -1),
        ("revision", 1.5),
        ("created_at", "hello"),
        ("updated_at", 2**60),
        ("manifest", b"{}"),
        ("note", b"\xff"),
    ],
)
def test_a_row_of_wrong_types_is_refused_by_name_and_costs_no_other_variant(
    store: VariantStore, tmp_path: Path, column: str, value: object
) -> None:
    add(store, tmp_path, "alice")
    good = add(store, tmp_path, "bob", revision=2)
    with sqlite3.connect(store.folder / "variants.db") as database:
        database.execute(f"UPDATE variants SET {column} = ? WHERE name = 'alice'", (value,))
    database.close()
    for call in (store.get, store.poll, store.acquire, store.verify):
        assert f"'alice' is damaged: {column}" in refusal(ErrorCode.STATE_CORRUPT, call, "alice")
    assert [record.name for record in store.list()] == ["bob"]
    assert list(store.names()) == ["alice", "bob"]
    assert served(store, "bob") == good
    assert len(store.remove("alice").unlinked) == 1
    assert add(store, tmp_path, "alice") == served(store, "alice")


def test_a_full_disk_is_reported_as_one_and_loses_nothing(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = add(store, tmp_path)
    delta, signed = signed_small_delta(tmp_path / "y.gymdelta", KEY, "bob")

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(os, "fsync", full)
        assert "no space" in refusal(ErrorCode.DISK_FULL, store.add, delta, signed, name="bob", owner=OWNER)
        refusal(ErrorCode.DISK_FULL, write_atomically, tmp_path / "keys.json", b"")
    assert served(store) == before
    assert not list((store.folder / "staging").iterdir())
    with sqlite3.connect(store.folder / "variants.db") as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.close()
    with store._registry._connection() as connection:
        connection.execute(f"PRAGMA max_page_count = {pages}")
    record = store.get("alice")

    def fill() -> None:
        with store._registry.writing() as transaction:
            for number in range(100):
                transaction.put(replace(record, name=f"v{number}", note="n" * 500))

    refusal(ErrorCode.DISK_FULL, fill)
    assert served(store) == before


def test_a_pipe_is_no_delta_and_a_name_that_no_text_can_hold_is_unknown(
    store: VariantStore, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, "alice")[1]
    for source in (tmp_path / "pipe", tmp_path):
        refusal(ErrorCode.FILE_NOT_FOUND, store.add, source, signed, name="alice", owner=OWNER)
    for call in (store.get, store.poll, store.remove, store.prefetch):
        refusal(ErrorCode.NOT_FOUND, call, "a\ud800")


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "is a file" in refusal(ErrorCode.USAGE, VariantStore.open, folder)
