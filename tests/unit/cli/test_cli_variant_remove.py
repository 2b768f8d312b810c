"""`gym variant remove`: everything of a variant is gone from disk and hub, and a signed receipt lists it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.keys import KeyFile
from gym_fed.trust.identity.keys import SigningKey
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
    hub = LoopbackHub(tmp_path_factory.mktemp("removal") / "hub")
    yield hub
    hub.close()


def gym(*words: object) -> Any:
    """Standard output of ``gym variant``, as JSON where it is; a refusal is raised."""
    done = CliRunner().invoke(app, ["variant", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout) if "--json" in words else done.stdout


def add(name: str, *seeds: int) -> None:
    for seed in seeds:
        small_delta(Path("x.gymdelta"), seed=seed)
        gym("add", "x.gymdelta", "--name", name, "--replace")


def test_all_revisions_work_and_names_are_gone_and_the_receipt_says_so(home: Path) -> None:
    add("ada", 1, 2)
    add("bo", 1)
    history = gym("history", "ada", "--json")
    for work in ("ada", f"ada.rebase-{'0' * 12}", "ada2"):
        (home / "variants" / "making" / work / "run").mkdir(parents=True)
        (home / "variants" / "making" / work / "run" / "rows.jsonl").write_text("the secret of ada")
    printed = gym("remove", "--yes", "ada")
    receipt = Path(printed.rsplit("receipt: ", 1)[1].strip())
    assert "removed ada: 2 revisions, 1 file deleted" in printed
    assert "because other variants have the same files" in printed
    assert {path.name for path in (home / "variants" / "making").iterdir()} == {"ada2"}
    kept = {path.stem for path in (home / "variants").glob("objects/*/*")}
    assert kept == {history[1]["sha256"]}
    database = b"".join(path.read_bytes() for path in (home / "variants").glob("variants.db*"))
    assert history[0]["sha256"].encode() not in database
    found = gym("receipt", "verify", receipt, "--json")
    assert (found["name"], found["is_owners"], found["valid"]) == ("ada", True, True)
    assert [row["sha256"] for row in found["revisions"]] == [row["sha256"] for row in history]
    assert found["unlinked"] == [history[0]["sha256"]]
    assert found["work"] == ["making/ada", f"making/ada.rebase-{'0' * 12}"]
    assert found["signed_by"] == SigningKey.load(home / "key.pem").contributor
    assert receipt.stat().st_mode & 0o777 == 0o600
    gym("verify", "bo")


def test_the_usage_log_and_the_keys_of_a_server_are_cleaned_and_the_receipt_counts_it(
    home: Path, tmp_path: Path
) -> None:
    add("ada", 1)
    use = {
        "at": 1.0,
        "model": "base:ada",
        "tokens": 4,
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "key": "anna",
    }
    Path("usage.jsonl").write_text(json.dumps({**use, "user": "a person"}) + "\n")
    KeyFile(Path("keys.json")).add("anna", base=False, variants=("ada",))
    Path("serving.yaml").write_text("base: gym-nano\napi_keys: keys.json\nusage_log: usage.jsonl\n")
    found = gym("remove", "--yes", "ada", "--serving", "serving.yaml", "--json")
    assert (found["usage_lines"], found["keys_removed"], found["keys_changed"]) == (1, ["anna"], [])
    assert "a person" not in Path("usage.jsonl").read_text()
    assert not any("usage logs" in kind for kind in found["not_covered"])
    assert gym("receipt", "verify", found["file"], "--json")["valid"]


def test_without_a_serving_config_the_receipt_names_what_was_not_searched(home: Path) -> None:
    add("ada", 1)
    found = gym("remove", "--yes", "ada", "--json")
    assert "usage logs and API keys of servers" in found["not_covered"]


def test_work_that_never_became_a_variant_can_be_removed(home: Path) -> None:
    add("bo", 1)
    (home / "variants" / "making" / "ada").mkdir(parents=True)
    assert gym("remove", "--yes", "ada", "--json")["work"] == ["making/ada"]
    with pytest.raises(GymError) as caught:
        gym("remove", "--yes", "ada")
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda found: found["removal"]["unlinked"].clear(), ErrorCode.SIGNATURE_INVALID),
        (lambda found: found["removal"].update(variant="bo"), ErrorCode.SIGNATURE_INVALID),
        (lambda found: found["removal"].update(more=1), ErrorCode.USAGE),
        (lambda found: found.update(signature="00"), ErrorCode.USAGE),
    ],
)
def test_a_receipt_that_was_changed_is_refused(home: Path, change: Any, code: ErrorCode) -> None:
    add("ada", 1)
    gym("remove", "--yes", "ada", "--receipt", "r.json")
    found = json.loads(Path("r.json").read_text())
    change(found)
    Path("r.json").write_text(json.dumps(found))
    with pytest.raises(GymError) as caught:
        gym("receipt", "verify", "r.json")
    assert caught.value.code is code


def test_a_receipt_is_never_written_over_another_file(home: Path) -> None:
    add("ada", 1)
    Path("r.json").write_text("mine")
    with pytest.raises(GymError) as caught:
        gym("remove", "--yes", "ada", "--receipt", "r.json")
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert gym("show", "ada", "--json")["revision"] == 1


def test_everywhere_removes_it_from_the_hub_and_the_receipt_proves_it(
    hub: LoopbackHub, home: Path, tmp_path: Path
) -> None:
    with hub.client(home, "ann"):
        pass
    delta, server = some_delta(tmp_path, seed=3), ("--server", hub.address)
    for name in ("poet", "cook"):
        gym("add", delta, "--name", name)
        gym("push", name, *server)
    printed = gym("remove", "--yes", "cook")
    assert f"hub {hub.address}: a copy is kept there: gym variant hub remove cook" in printed
    found = gym("remove", "--yes", "poet", "--everywhere", "--json")
    assert [one["status"] for one in found["hubs"]] == ["removed"]
    assert [row["variant"] for row in gym("hub", "list", *server, "--json")] == ["cook"]
    verified = gym("receipt", "verify", found["file"], "--json")["hubs"]
    assert (verified[0]["proven"], verified[0]["is_same_document"]) == (True, True)
    assert verified[0]["ledger_sequence"] > 0
    assert "removed by entry" in gym("receipt", "verify", found["file"])


def test_without_a_consent_nothing_is_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add("ada", 1)
    with pytest.raises(GymError) as refused:
        gym("remove", "ada")
    assert (refused.value.code, refused.value.hint) == (ErrorCode.USAGE, "pass --yes")
    asked: list[str] = []

    def no(question: str, *_: str) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr("gym_client.cli.terminal.confirm", no)
    with pytest.raises(GymError, match="nothing was removed"):
        gym("remove", "ada", "--everywhere")
    assert asked == [
        "All revisions of ada will be deleted on this machine and on every hub. This cannot be undone. Continue?"
    ]
    assert "ada" in gym("list")
    assert not list((home / "variants").glob("receipts/*"))
