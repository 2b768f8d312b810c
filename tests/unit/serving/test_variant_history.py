"""Earlier revisions of a variant: kept up to a limit, listed, and restored under a new number."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.registry import VariantRegistry
from gym_fed.serving.store.signing import undo
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.small_variants import fake_loader, signed_small_delta, small_base, small_delta

KEY = SigningKey.generate()


@pytest.fixture
def store(tmp_path: Path) -> VariantStore:
    return VariantStore.open(tmp_path / "store", base=small_base(), loader=fake_loader)


def add(store: VariantStore, folder: Path, revision: int, **figures: float) -> str:
    """The sha256 of a new revision; each has another delta."""
    delta, signed = signed_small_delta(folder / "x.gymdelta", KEY, "ada", revision=revision, seed=revision)
    record = store.add(delta, signed, name="ada", owner=KEY.contributor, replace=True, figures=figures)
    return record.sha256


def served(store: VariantStore) -> str:
    variant = store.acquire("ada")
    store.release(variant)
    return variant.delta_sha256


def revisions(store: VariantStore) -> list[int]:
    return [one.record.revision for one in store.history.of("ada")]


def objects(store: VariantStore) -> set[str]:
    return {path.stem for path in store.folder.glob("objects/*/*")}


def test_undo_serves_the_earlier_delta_as_a_newer_signed_revision(
    store: VariantStore, tmp_path: Path
) -> None:
    first, second = add(store, tmp_path, 1, loss=2.0), add(store, tmp_path, 2, loss=1.0)
    assert served(store) == second
    with VariantStore.open(store.folder) as other:
        record, earlier = undo(other, "ada", KEY)
    assert (record.revision, record.sha256, earlier) == (3, first, 1)
    assert record.note == "revision 1 again"
    assert served(store) == first
    store.verify("ada")
    assert [one.figures for one in store.history.of("ada")] == [{"loss": 2.0}, {"loss": 1.0}, {"loss": 2.0}]
    record, earlier = undo(store, "ada", KEY, to=2)
    assert (record.revision, record.sha256, earlier) == (4, second, 2)
    old, signed = signed_small_delta(tmp_path / "x.gymdelta", KEY, "ada", revision=2, seed=2)
    with pytest.raises(GymError) as caught:
        store.add(old, signed, name="ada", owner=KEY.contributor, replace=True)
    assert caught.value.code is ErrorCode.STALE


def test_as_many_revisions_are_kept_as_the_store_says_and_gc_honours_fewer(
    store: VariantStore, tmp_path: Path
) -> None:
    made = [add(store, tmp_path, number) for number in range(1, 13)]
    assert store.history.kept() == 10
    assert revisions(store) == list(range(12, 2, -1))
    assert objects(store) == set(made[2:])
    store.history.keep(2)
    assert store.gc()[0] == 8
    assert revisions(store) == [12, 11]
    assert objects(store) == set(made[10:])
    with VariantStore.open(store.folder) as again:
        made.append(add(again, tmp_path, 13))
        assert (again.history.kept(), revisions(again)) == (2, [13, 12])
    assert objects(store) == {made[12], made[11]}
    removed = store.remove("ada")
    assert [record.revision for record in removed.revisions] == [13, 12]
    assert set(removed.unlinked) == {made[12], made[11]}
    assert objects(store) == set()


def test_what_is_damaged_revoked_or_not_kept_does_not_come_back(store: VariantStore, tmp_path: Path) -> None:
    first = add(store, tmp_path, 1)
    with pytest.raises(GymError, match="has no earlier revision in this store") as caught:
        undo(store, "ada", KEY)
    assert caught.value.code is ErrorCode.NOT_FOUND
    add(store, tmp_path, 2)
    with pytest.raises(GymError, match="has no earlier revision 7 in this store"):
        undo(store, "ada", KEY, to=7)
    path = store.folder / "objects" / first[:2] / f"{first}.gymdelta"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\0")
    with pytest.raises(GymError) as caught:
        undo(store, "ada", KEY)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    path.write_bytes(whole)
    store.revoke(KEY.contributor, KEY.public_key)
    with pytest.raises(GymError) as caught:
        undo(store, "ada", KEY)
    assert caught.value.code is ErrorCode.KEY_REVOKED
    assert revisions(store) == [2, 1]


def test_an_unsigned_revision_whose_bytes_were_changed_does_not_come_back(tmp_path: Path) -> None:
    with VariantStore.open(tmp_path / "s", require_signature=False) as store:
        for seed in (1, 2):
            small_delta(tmp_path / "x.gymdelta", seed=seed)
            store.add(tmp_path / "x.gymdelta", name="ada", owner="ada", replace=True)
        newest, first = store.history.of("ada")
        small_delta(tmp_path / "other.gymdelta", seed=3)
        store.history.path(first).write_bytes((tmp_path / "other.gymdelta").read_bytes())
        with pytest.raises(GymError) as caught:
            undo(store, "ada", None)
        assert caught.value.code is ErrorCode.HASH_MISMATCH
        assert store.get("ada") == newest.record


def test_a_revision_that_changes_between_its_check_and_its_signature_is_not_signed(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, tmp_path, 1), add(store, tmp_path, 2)
    first = store.history.of("ada")[1]
    small_delta(tmp_path / "other.gymdelta", seed=3)
    other = (tmp_path / "other.gymdelta").read_bytes()
    monkeypatch.setattr(store.history, "verify", lambda one: store.history.path(one).write_bytes(other))
    with pytest.raises(GymError, match="changed while it was being signed") as caught:
        undo(store, "ada", KEY)
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert revisions(store) == [2, first.record.revision]


@pytest.mark.parametrize("schema", [1, 3])
def test_a_store_of_another_schema_is_refused_by_its_number(store: VariantStore, schema: int) -> None:
    store.close()
    with sqlite3.connect(store.folder / "variants.db") as database:
        database.execute(f"PRAGMA user_version = {schema}")
    database.close()
    with pytest.raises(GymError, match=f"has schema version {schema}, but this release supports 2") as caught:
        VariantRegistry(store.folder / "variants.db")
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_history_and_undo_at_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def gym(*words: str) -> str:
        done = CliRunner().invoke(app, ["variant", *words], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    for seed, more in ((1, ()), (2, ("--replace",))):
        small_delta(Path("x.gymdelta"), seed=seed)
        gym("add", "x.gymdelta", "--name", "ada", "--user", "ada", "--note", f"draw {seed}", *more)
    assert gym("undo", "ada") == "variant ada: revision 3 restores revision 1\n"
    rows = json.loads(gym("history", "ada", "--json"))
    assert [row["revision"] for row in rows] == [3, 2, 1]
    assert rows[0]["sha256"] == rows[2]["sha256"] != rows[1]["sha256"]
    assert rows[0]["note"] == "revision 1 again: draw 1"
    assert rows[0]["codecs"] == ["bitdelta", "dense"]
    assert rows[0]["signed_by"] == SigningKey.load(tmp_path / "key.pem").contributor
    table = gym("history", "ada")
    assert "3 (newest)" in table
    assert "draw 2" in table
    gym("verify", "ada")
    assert gym("gc", "--keep", "1").startswith("removed 1 file")
    assert [row["revision"] for row in json.loads(gym("history", "ada", "--json"))] == [3]
