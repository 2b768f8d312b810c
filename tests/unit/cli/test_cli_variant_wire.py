"""`gym variant push`, `pull`, `hub` and `gym-server variants`: two people's stores, and a hub in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from gym_client.hub.rotation import rotate
from gym_server.cli.main import app as server_app
from typer.testing import CliRunner

from gym_fed.cli.variant.app import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from tests.support.loopback_hub import LoopbackHub, some_delta


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path_factory.mktemp("wire") / "hub")
    yield hub
    hub.close()


class Person:
    """A home with an account at the hub, and a variant store."""

    def __init__(self, hub: LoopbackHub, folder: Path) -> None:
        self.home, self.store, self.address = folder / "home", folder / "variants", hub.address
        with hub.client(self.home, folder.name) as client:
            self.account, self.key, self.main = client.pin.contributor, client.home.key, client.home

    def run(self, *words: str) -> Result:
        where = ["--home", str(self.home), "--server", self.address]
        kept = [] if words[0] == "hub" else ["--store", str(self.store)]
        return CliRunner().invoke(app, [*words, *where, *kept])

    def ask(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.exception is None, done.exception
        return json.loads(done.stdout)

    def refused(self, code: ErrorCode, *words: str) -> GymError:
        error = self.run(*words).exception
        assert isinstance(error, GymError), error
        assert error.code is code, error
        return error

    def has(self, delta: Path, name: str, owner: str | None = None, replace: bool = False) -> None:
        """Put an unsigned variant into the store."""
        with VariantStore.open(self.store, require_signature=False) as store:
            store.add(delta, name=name, owner=owner or self.account, replace=replace, note="by hand")

    def record(self, name: str) -> Any:
        with VariantStore.open(self.store, require_signature=False) as store:
            return store.get(name)


@pytest.fixture
def ann(hub: LoopbackHub, tmp_path: Path) -> Person:
    return Person(hub, tmp_path / "ann")


@pytest.fixture
def bob(hub: LoopbackHub, tmp_path: Path) -> Person:
    return Person(hub, tmp_path / "bob")


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    return some_delta(tmp_path, seed=11)


def test_a_variant_goes_from_one_store_by_the_hub_to_another(ann: Person, bob: Person, delta: Path) -> None:
    ann.has(delta, "poet")
    pushed = ann.ask("push", "poet", "--readers", bob.account)
    assert pushed["revision"] == 1
    signed = ann.record("poet").signed()
    assert signed.manifest.owner == ann.account, "an unsigned one is signed before it is sent, here too"
    assert signed.manifest.note == "by hand"
    pulled = bob.ask("pull", "poet", "--user", ann.account)
    assert (pulled["owner"], pulled["revision"]) == (ann.account, 1)
    assert bob.record("poet").signed() == signed
    with VariantStore.open(bob.store) as store:
        assert store.path("poet").read_bytes() == delta.read_bytes()
        store.verify("poet")
    assert not list((bob.store / "incoming").iterdir())
    assert bob.ask("pull", "poet", "--user", ann.account)["revision"] == 1, "pulled again, it is the same"


def test_a_push_again_changes_nothing_and_a_new_delta_is_a_new_revision(
    ann: Person, bob: Person, delta: Path, tmp_path: Path
) -> None:
    ann.has(delta, "poet")
    first, again = ann.ask("push", "poet", "--public"), ann.ask("push", "poet")
    assert first["proof"]["entry"] == again["proof"]["entry"]
    assert bob.ask("pull", "poet", "--user", ann.account)["revision"] == 1
    with VariantStore.open(ann.store, require_signature=False) as store:
        store.remove("poet")
    ann.has(some_delta(tmp_path, seed=12), "poet")
    assert "revision 2" in ann.refused(ErrorCode.REPLAYED, "push", "poet").hint
    assert ann.ask("push", "poet", "--revision", "2")["revision"] == 2
    assert ann.record("poet").revision == 2
    assert bob.ask("pull", "poet", "--user", ann.account)["revision"] == 2
    assert ann.ask("push", "poet", "--private")["revision"] == 2
    bob.refused(ErrorCode.NOT_FOUND, "pull", "poet", "--user", ann.account)


def test_after_a_rotation_what_was_signed_before_is_signed_anew_and_pulled(
    ann: Person, bob: Person, delta: Path
) -> None:
    ann.has(delta, "poet")
    ann.ask("push", "poet", "--public")
    rotate(ann.main)
    assert ann.ask("push", "poet")["revision"] == 2
    bob.ask("pull", "poet", "--user", ann.account)
    assert bob.record("poet").signed() == ann.record("poet").signed()
    with VariantStore.open(bob.store) as store:
        store.verify("poet")


def test_the_list_shows_each_what_is_theirs_to_know(ann: Person, bob: Person, delta: Path) -> None:
    ann.has(delta, "poet")
    ann.ask("push", "poet", "--readers", bob.account)
    ann.has(delta, "own")
    ann.ask("push", "own")
    listed = {row["variant"]: row for row in ann.ask("hub", "list") if row["owner"] == ann.account}
    assert {name: row["num_readers"] for name, row in listed.items()} == {"poet": 1, "own": 0}
    shown = [row["variant"] for row in bob.ask("hub", "list") if row["owner"] == ann.account]
    assert shown == ["poet"]
    text = ann.run("hub", "list").stdout
    assert "1 other" in text
    assert "you alone" in text
    ann.ask("hub", "remove", "poet")
    bob.refused(ErrorCode.NOT_FOUND, "pull", "poet", "--user", ann.account)
    assert ann.record("poet").name == "poet", "the store keeps its own"


def test_a_variant_of_a_user_id_is_pushed_pulled_and_goes_on_under_that_id_on_another_machine(
    ann: Person, bob: Person, delta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def next_revision(folder: Path, delta: Path, revision: int) -> None:
        signed = sign_variant(delta, ann.key, name="mine", revision=revision)
        with VariantStore.open(folder) as store:
            store.add(delta, signed, name="mine", owner="me", replace=True)

    next_revision(ann.store, delta, 1)
    assert ann.ask("push", "mine", "--public")["revision"] == 1
    monkeypatch.setattr("gym_client.variants.download", None)  # nothing that is here is fetched
    again = ann.ask("pull", "mine")
    assert (again["owner"], again["revision"]) == ("me", 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bob, "store", ann.store)
        bob.refused(ErrorCode.PERMISSION_DENIED, "pull", "mine", "--user", "another")
    monkeypatch.undo()
    here, ann.store = ann.store, tmp_path / "laptop"
    assert ann.ask("pull", "mine", "--user", "me")["owner"] == "me"
    next_revision(ann.store, some_delta(tmp_path, seed=13), 2)
    assert ann.ask("push", "mine")["revision"] == 2
    ann.store = here
    assert ann.ask("pull", "mine")["revision"] == 2


def test_a_name_that_is_anothers_here_is_refused_before_anything_is_fetched(
    ann: Person, delta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann.has(delta, "poet")
    ann.ask("push", "poet")
    ann.store = ann.store.with_name("other")
    ann.has(delta, "poet", owner="eve")
    monkeypatch.setattr("gym_client.variants.download", None)
    assert "--user eve" in ann.refused(ErrorCode.PERMISSION_DENIED, "pull", "poet").hint


def test_anothers_variant_is_not_pushed_as_ones_own(ann: Person, bob: Person, delta: Path) -> None:
    ann.has(delta, "poet")
    ann.ask("push", "poet", "--public")
    bob.ask("pull", "poet", "--user", ann.account)
    bob.refused(ErrorCode.PERMISSION_DENIED, "push", "poet")


def test_options_that_contradict_each_other_are_refused(ann: Person, delta: Path) -> None:
    ann.has(delta, "poet")
    ann.refused(ErrorCode.USAGE, "push", "poet", "--public", "--private")
    ann.refused(ErrorCode.USAGE, "push", "poet", "--readers", "a,,b")


def test_the_coordinator_sees_all_of_them_and_can_take_one_down(
    hub: LoopbackHub, ann: Person, delta: Path
) -> None:
    ann.has(delta, "poet")
    ann.ask("push", "poet")
    where = ["--dir", str(hub.fed.folder)]
    listed = json.loads(CliRunner().invoke(server_app, ["variants", "list", *where, "--json"]).stdout)
    mine = next(row for row in listed if row["owner"] == ann.account)
    assert (mine["variant"], mine["base"], mine["readers"]) == ("poet", "base", [])
    assert "its owner" in CliRunner().invoke(server_app, ["variants", "list", *where]).stdout
    words = ["variants", "remove", ann.account, "poet", "--reason", "asked to", *where]
    assert json.loads(CliRunner().invoke(server_app, [*words, "--json"]).stdout)["held"] is False
    ann.refused(ErrorCode.NOT_FOUND, "pull", "poet")
    assert "asked to" in str(ann.refused(ErrorCode.PERMISSION_DENIED, "push", "poet", "--revision", "2"))
    words = ["variants", "allow", ann.account, "poet", *where]
    assert "may push variant poet again" in CliRunner().invoke(server_app, words).stdout
    assert ann.ask("push", "poet", "--revision", "2")["held"] is True
    hub.fed.ledger.verify()
