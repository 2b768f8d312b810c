"""Bulk addition of variants: all or none, every refused file named, identical files stored once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store import bulk
from gym_fed.serving.store.bulk import IncomingVariant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.small_variants import fake_loader, small_base, small_delta

KEY = SigningKey.generate()
OWNER = KEY.contributor


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VariantStore]:
    with VariantStore.open(tmp_path / "store", base=small_base(), loader=fake_loader) as opened:
        yield opened


def several(folder: Path, count: int = 5) -> list[IncomingVariant]:
    found = [small_delta(folder / f"v{seed}.gymdelta", seed) for seed in range(count)]
    return [IncomingVariant(path, path.stem, OWNER, f"note {path.stem}") for path in found]


def objects(store: VariantStore) -> int:
    return sum(1 for _ in store.folder.glob("objects/*/*"))


def staged(store: VariantStore) -> list[Path]:
    return list((store.folder / "staging").iterdir())


def test_many_are_added_signed_and_each_is_in_order_and_served(store: VariantStore, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    records = store.add_all(several(tmp_path), KEY, progress=lambda *step: seen.append(step))
    assert [record.name for record in store.list()] == ["v0", "v1", "v2", "v3", "v4"]
    for record in records:
        assert store.verify(record.name) == record
        assert (record.signed().signed_by, record.note) == (OWNER, f"note {record.name}")  # type: ignore[union-attr]
        variant = store.acquire(record.name)
        assert variant.delta_sha256 == record.sha256
        store.release(variant)
    assert seen[4] == ("checking", 5, 5)
    assert seen[-1] == ("syncing", 5, 5)
    assert staged(store) == []


def test_every_file_at_fault_is_named_and_none_is_added(store: VariantStore, tmp_path: Path) -> None:
    new = several(tmp_path)
    new[1].delta.write_bytes(new[1].delta.read_bytes()[:-8])
    small_delta(new[3].delta, base=small_base("b"))
    with pytest.raises(GymError) as caught:
        store.add_all(new, KEY)
    assert caught.value.code is ErrorCode.DELTA_INVALID
    assert "refused 2 of 5 variants; none was added" in caught.value.message
    for number in range(5):
        assert (f"v{number}.gymdelta" in caught.value.message) is (number in (1, 3))
    assert (store.count(), objects(store), staged(store)) == (0, 0, [])


def test_a_name_that_is_taken_refuses_all_until_replace_is_given(store: VariantStore, tmp_path: Path) -> None:
    new = several(tmp_path, 3)
    store.add_all(new[:1], KEY)
    small_delta(new[0].delta, seed=9)
    with pytest.raises(GymError, match=r"v0\.gymdelta: variant 'v0' exists") as caught:
        store.add_all(new, KEY)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert (store.count(), objects(store)) == (1, 1)
    assert [record.revision for record in store.add_all(new, KEY, replace=True)] == [2, 1, 1]
    assert store.count() == 3


def test_two_files_of_one_name_are_refused_before_anything_is_written(
    store: VariantStore, tmp_path: Path
) -> None:
    new = several(tmp_path, 1)
    with pytest.raises(GymError, match="both be named 'v0'") as caught:
        store.add_all([*new, *new], KEY)
    assert caught.value.code is ErrorCode.USAGE
    assert (store.count(), staged(store)) == (0, [])


def test_identical_files_are_checked_and_stored_once(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    check = bulk.checked_base

    def counted(staged: object, source: Path, *known: object) -> tuple[str, str]:
        checked.append(source)
        return check(staged, source, *known)  # type: ignore[arg-type]

    monkeypatch.setattr(bulk, "checked_base", counted)
    path = small_delta(tmp_path / "x.gymdelta")
    store.add_all([IncomingVariant(path, f"same-{number}", OWNER) for number in range(20)], KEY)
    assert (store.count(), objects(store), len(checked), staged(store)) == (20, 1, 1, [])
    assert store.verify("same-19").sha256 == store.get("same-0").sha256
    store.remove("same-0")
    store.verify("same-19")


def test_unsigned_ones_are_refused_where_signatures_are_required(store: VariantStore, tmp_path: Path) -> None:
    with pytest.raises(GymError) as caught:
        store.add_all(several(tmp_path), None)
    assert caught.value.code is ErrorCode.SIGNATURE_INVALID
    assert store.count() == 0


def test_more_faults_than_are_shown_are_counted(store: VariantStore, tmp_path: Path) -> None:
    new = [IncomingVariant(tmp_path / f"gone-{number}", f"v{number}", OWNER) for number in range(25)]
    with pytest.raises(GymError) as caught:
        store.add_all(new, KEY)
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    assert "gone-19:" in caught.value.message
    assert "gone-20:" not in caught.value.message
    assert caught.value.message.endswith("and 5 others")
