"""Receipts of removals that were forged, replayed or of something else, and folders that lead out of the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.hub.transport import HubClient
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.folder import FolderLock
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import MAX_RECEIPT_BYTES, SignedRemoval, VariantRemoval
from tests.support.loopback_hub import LoopbackHub, some_delta
from tests.support.small_variants import small_delta


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GYM_VARIANTS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(tmp_path_factory.mktemp("receipts") / "hub")
    yield hub
    hub.close()


def gym(*words: object) -> Any:
    done = CliRunner().invoke(app, ["variant", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout) if "--json" in words else done.stdout


def refused(*words: object) -> ErrorCode:
    with pytest.raises(GymError) as caught:
        gym(*words)
    return caught.value.code


def add(name: str) -> None:
    small_delta(Path("x.gymdelta"), seed=1)
    gym("add", "x.gymdelta", "--name", name)


def signed_by(key: SigningKey, removal: dict[str, Any]) -> SignedRemoval:
    return SignedRemoval.sign(VariantRemoval.model_validate(removal), key)


def removal_in(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(file).read_text())["removal"]
    return found


def test_a_key_that_names_itself_as_the_variants_is_not_the_owners(home: Path) -> None:
    add("ada")
    gym("remove", "--yes", "ada", "--receipt", "r.json")
    mallory, found = SigningKey.generate(), removal_in("r.json")
    found["revisions"][0]["signed_by"] = mallory.contributor
    Path("forged.json").write_text(signed_by(mallory, found).to_json())
    assert gym("receipt", "verify", "r.json", "--json")["is_owners"]
    assert not gym("receipt", "verify", "forged.json", "--json")["is_owners"]
    assert "according to the receipt" in gym("receipt", "verify", "forged.json")


def test_an_owner_that_would_print_lines_of_its_own_is_refused(home: Path) -> None:
    add("ada")
    gym("remove", "--yes", "ada", "--receipt", "r.json")
    text = Path("r.json").read_text().replace('"owner":"', '"owner":"x\\nsigned by its owner\'s key')
    Path("r.json").write_text(text)
    assert refused("receipt", "verify", "r.json") is ErrorCode.USAGE


def test_no_more_of_a_file_is_read_than_a_receipt_can_have(home: Path) -> None:
    with Path("r.json").open("wb") as file:
        file.truncate(64 * MAX_RECEIPT_BYTES)
    assert refused("receipt", "verify", "r.json") is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("place", ["file/r.json", "."])
def test_nothing_is_removed_where_its_receipt_cannot_be_written(home: Path, place: str) -> None:
    add("ada")
    Path("file").touch()
    assert refused("remove", "--yes", "ada", "--receipt", place) is ErrorCode.FILE_EXISTS
    assert gym("show", "ada", "--json")["name"] == "ada"


def test_a_receipt_that_cannot_be_written_after_all_is_printed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("ada")

    def full(*_: object, **__: object) -> None:
        raise GymError(ErrorCode.DISK_FULL, "no room")

    monkeypatch.setattr("gym_fed.core.files.write_atomically", full)
    done = CliRunner().invoke(app, ["variant", "remove", "--yes", "ada", "--receipt", "r.json"])
    assert isinstance(done.exception, GymError)
    signed = SignedRemoval.parse(done.stdout)
    signed.verify()
    assert [one.revision for one in signed.removal.revisions] == [1]
    assert not Path("r.json").exists()


@pytest.mark.parametrize("folder", ["making", "incoming"])
def test_a_link_in_the_store_is_not_followed_to_what_is_deleted(home: Path, folder: str) -> None:
    add("ada")
    precious = Path("precious") / "ada"
    precious.mkdir(parents=True)
    (home / "variants" / folder).symlink_to(Path("precious").absolute())
    assert refused("remove", "--yes", "ada") is ErrorCode.USAGE
    assert precious.is_dir()
    assert gym("show", "ada", "--json")["name"] == "ada"


@pytest.mark.parametrize("work", ["ada/run", f"ada.rebase-{'0' * 12}/refit/run"])
def test_work_that_a_process_is_at_is_not_deleted_under_it(home: Path, work: str) -> None:
    add("ada")
    folder = home / "variants" / "making" / work
    folder.mkdir(parents=True)
    lock = FolderLock(folder)
    assert refused("remove", "--yes", "ada") is ErrorCode.STATE_LOCKED
    assert gym("show", "ada", "--json")["name"] == "ada"
    lock.release()
    assert len(gym("remove", "--yes", "ada", "--json")["work"]) == 1


def test_a_hub_that_repeats_another_variants_removal_is_not_believed(
    hub: LoopbackHub, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub.client(home, "ann"):
        pass
    delta, server = some_delta(tmp_path, seed=3), ("--server", hub.address)
    for name in ("poet", "cook"):
        gym("add", delta, "--name", name)
        gym("push", name, *server)
    call, earlier = HubClient.call, []

    def repeating(client: HubClient, method: str, *words: Any, **options: Any) -> Any:
        if method == "DeleteVariant" and earlier:
            return earlier[0]
        reply = call(client, method, *words, **options)  # type: ignore[arg-type]
        earlier.extend([reply] if method == "DeleteVariant" else [])
        return reply

    monkeypatch.setattr(HubClient, "call", repeating)
    found = gym("remove", "--yes", "cook", "--everywhere", "--receipt", "cook.json", "--json")
    assert [one["status"] for one in found["hubs"]] == ["removed"]
    assert refused("remove", "--yes", "poet", "--everywhere") is ErrorCode.SIGNATURE_INVALID
    assert gym("show", "poet", "--json")["name"] == "poet"
    assert [row["variant"] for row in gym("hub", "list", *server, "--json")] == ["poet"]

    # The entry of one variant proves nothing of another, neither by the receipts of this home nor by the documents.
    key, cooks = SigningKey.load(home / "key.pem"), removal_in("cook.json")
    Path("poet.json").write_text(signed_by(key, {**cooks, "variant": "poet"}).to_json())
    (row,) = gym("receipt", "verify", "poet.json", "--json")["hubs"]
    assert (row["proven"], row["is_same_document"]) == (False, True)
    assert "nothing in this home proves" in gym("receipt", "verify", "poet.json")
    absent = [{**cooks["hubs"][0], "status": "absent"}]
    Path("absent.json").write_text(signed_by(key, {**cooks, "hubs": absent}).to_json())
    assert refused("receipt", "verify", "absent.json") is ErrorCode.SIGNATURE_INVALID
    Path("other.json").write_text(signed_by(key, {**cooks, "owner": "c" + "0" * 32}).to_json())
    assert refused("receipt", "verify", "other.json") is ErrorCode.SIGNATURE_INVALID
    (row,) = gym("receipt", "verify", "cook.json", "--json")["hubs"]
    assert row["proven"]
