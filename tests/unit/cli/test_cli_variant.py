"""`gym variant`: add, list, show, verify, trust, remove and gc, as a person types them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.trust.identity.keys import SigningKey
from tests.support.small_variants import small_delta


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a key, the shell's variables, and a delta at hand."""
    folder = tmp_path / "home"
    monkeypatch.setenv("GYM_HOME", str(folder))
    monkeypatch.delenv("GYM_VARIANTS", raising=False)
    small_delta(tmp_path / "x.gymdelta")
    monkeypatch.chdir(tmp_path)
    return folder


def gym(*words: object) -> str:
    """Standard output of ``gym variant``; a refusal is raised."""
    done = CliRunner().invoke(app, ["variant", *map(str, words)])
    if isinstance(done.exception, GymError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def answer(*words: object) -> Any:
    return json.loads(gym(*words, "--json"))


def refusal(code: ErrorCode, *words: object) -> str:
    with pytest.raises(GymError) as caught:
        gym(*words)
    assert caught.value.code is code, caught.value
    return str(caught.value)


def test_a_variant_is_added_signed_listed_shown_replaced_and_removed(home: Path) -> None:
    assert gym("add", "x.gymdelta", "--name", "alice", "--note", "first").startswith("added alice")
    owner = SigningKey.load(home / "key.pem").contributor
    shown = answer("show", "alice")
    assert (shown["owner"], shown["signed_by"], shown["revision"], shown["note"]) == (
        owner,
        owner,
        1,
        "first",
    )
    assert Path(shown["file"]).is_relative_to(home / "variants")
    assert Path(shown["file"]).is_file()
    assert "exists" in refusal(ErrorCode.FILE_EXISTS, "add", "x.gymdelta", "--name", "alice")
    assert answer("add", "x.gymdelta", "--name", "alice", "--replace")["revision"] == 2
    table = gym("list")
    assert "alice" in table
    assert owner in table
    assert gym("verify", "alice") == "alice: ok\n"
    assert "removed alice" in gym("remove", "--yes", "alice")
    assert answer("list") == []
    refusal(ErrorCode.NOT_FOUND, "show", "alice")
    refusal(ErrorCode.NOT_FOUND, "remove", "--yes", "alice")


def test_list_shows_one_users_variants_and_a_store_can_be_anywhere(home: Path, tmp_path: Path) -> None:
    store = ("--store", tmp_path / "elsewhere")
    gym("add", "x.gymdelta", "--name", "a", "--user", "ann", *store)
    gym("add", "x.gymdelta", "--name", "b", "--user", "bob", "--unsigned", *store)
    assert [row["name"] for row in answer("list", *store)] == ["a", "b"]
    assert [row["name"] for row in answer("list", "--user", "bob", *store)] == ["b"]
    assert answer("show", "b", *store)["signed_by"] is None
    assert "no variant store" in refusal(ErrorCode.FILE_NOT_FOUND, "list")


def test_a_key_of_ones_own_choice_signs_and_is_then_its_users(home: Path, tmp_path: Path) -> None:
    first, second = SigningKey.generate(), SigningKey.generate()
    first.save(tmp_path / "first.pem")
    second.save(tmp_path / "second.pem")
    add = ("add", "x.gymdelta", "--user", "ann", "--name")
    assert answer(*add, "a", "--key", "first.pem")["signed_by"] == first.contributor
    command = f"trust ann {second.public_key.hex()}"
    assert command in refusal(ErrorCode.SIGNATURE_INVALID, *add, "b", "--key", "second.pem")
    gym(*command.split())
    assert answer(*add, "b", "--key", "second.pem")["signed_by"] == second.contributor
    gym(*command.split(), "--revoke")
    refusal(ErrorCode.KEY_REVOKED, "verify", "b")
    refusal(ErrorCode.KEY_REVOKED, *command.split())
    gym("verify", "a")


def test_a_rotated_key_signs_for_its_account_once_it_is_trusted(home: Path, tmp_path: Path) -> None:
    account, newer = SigningKey.generate().contributor, SigningKey.generate()
    newer.save(tmp_path / "newer.pem")
    add = ("add", "x.gymdelta", "--name", "a", "--user", account, "--key", "newer.pem")
    refusal(ErrorCode.SIGNATURE_INVALID, *add)
    gym("trust", account, newer.public_key.hex())
    assert answer(*add)["owner"] == account


def test_verify_reports_every_fault_and_fails_with_the_first(home: Path) -> None:
    for number, name in enumerate(("a", "b", "c")):
        small_delta(Path("x.gymdelta"), seed=number)
        gym("add", "x.gymdelta", "--name", name, *(("--user", "u", "--unsigned") if name == "c" else ()))
    damaged = Path(answer("show", "b")["file"])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    done = CliRunner().invoke(app, ["variant", "verify", "--all", "--json"])
    assert done.exit_code == ErrorCode.HASH_MISMATCH.exit_code
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert [rows[name]["ok"] for name in "abc"] == [True, False, False]
    assert rows["b"]["code"] == "hash-mismatch"
    assert str(damaged) in rows["b"]["message"]
    assert rows["c"]["code"] == "signature-invalid"
    gym("verify", "c", "--allow-unsigned")
    refusal(ErrorCode.HASH_MISMATCH, "verify", "b")
    refusal(ErrorCode.USAGE, "verify")
    refusal(ErrorCode.USAGE, "verify", "a", "--all")


def test_gc_reports_what_it_removed(home: Path) -> None:
    gym("add", "x.gymdelta", "--name", "a")
    orphan = home / "variants" / "objects" / "00" / f"{'0' * 64}.gymdelta"
    orphan.parent.mkdir()
    orphan.write_bytes(b"123")
    assert answer("gc") == {"files": 1, "bytes": 3}
    assert "removed 0 files" in gym("gc")
    gym("verify", "--all")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ErrorCode.FILE_NOT_FOUND, "add no.gymdelta --name a"),
        (ErrorCode.USAGE, "add x.gymdelta --name a:b"),
        (ErrorCode.USAGE, "add x.gymdelta --name a --user a/b"),
        (ErrorCode.USAGE, "add x.gymdelta --name a --unsigned"),
        (ErrorCode.USAGE, "add x.gymdelta --name a --user u --unsigned --key k.pem"),
        (ErrorCode.FILE_NOT_FOUND, "add x.gymdelta --name a --key no.pem"),
        (ErrorCode.USAGE, "trust ann abc"),
        (ErrorCode.FILE_NOT_FOUND, "gc"),
    ],
)
def test_what_cannot_be_is_refused_and_no_store_is_left_half_made(
    home: Path, code: ErrorCode, words: str
) -> None:
    refusal(code, *words.split())
    if (home / "variants").exists():
        assert answer("list") == []


def test_damaged_rows_are_reported_by_verify_and_can_be_removed(home: Path) -> None:
    for name in ("a", "b", "c"):
        gym("add", "x.gymdelta", "--name", name)
    with sqlite3.connect(home / "variants" / "variants.db") as database:
        database.execute("UPDATE variants SET created_at = 'hello' WHERE name = 'a'")
        database.execute("UPDATE variants SET manifest = '{' WHERE name = 'b'")
    database.close()
    first = answer("list")[0]
    assert (first["name"], first["signed_by"]) == ("b", "unreadable")
    done = CliRunner().invoke(app, ["variant", "verify", "--all", "--json"])
    assert [(row["name"], row["ok"]) for row in json.loads(done.stdout)] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]
    assert "created_at is 'hello'" in refusal(ErrorCode.STATE_CORRUPT, "show", "a")
    assert answer("remove", "--yes", "a")["name"] == "a"
    assert "b" in gym("remove", "--yes", "b")
    refusal(ErrorCode.NOT_FOUND, "show", "a")


def test_a_folder_of_deltas_is_added_in_one_go_under_the_names_of_its_files(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "many").mkdir()
    for seed in range(3):
        small_delta(tmp_path / "many" / f"v{seed}.gymdelta", seed)
    assert gym("add", "--from", "many").startswith("added 3 variants to ")
    assert [row["name"] for row in answer("list")] == ["v0", "v1", "v2"]
    both = answer("add", "many/v0.gymdelta", "many/v1.gymdelta", "--replace")
    assert [(row["name"], row["revision"]) for row in both] == [("v0", 2), ("v1", 2)]
    for words in ((), ("x.gymdelta", "--from", "many"), ("--from", "many", "--name", "a")):
        refusal(ErrorCode.USAGE, "add", *words)
    assert "applies to one file" in refusal(
        ErrorCode.USAGE, "add", "x.gymdelta", "many/v0.gymdelta", "--name", "a"
    )


def test_a_list_gives_each_delta_its_name_its_user_and_a_note(home: Path, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    listed = tmp_path / "lists" / "list.jsonl"
    rows = [
        {"file": "../x.gymdelta", "name": "a", "user": "ann", "note": "hers"},
        {"file": "../x.gymdelta", "name": "b"},
    ]
    listed.write_text("\n".join(map(json.dumps, rows)))
    owner = answer("add", "--from", "lists/list.jsonl")[1]["owner"]
    assert [(row["owner"], row["note"]) for row in answer("list")] == [("ann", "hers"), (owner, "")]
    for bad in ('{"file": "x", "nam": "a"}', '["x"]', "x", '{"name": "a"}', '{"file": 1}'):
        listed.write_text(f"\n{bad}\n")
        assert "list.jsonl, line 2" in refusal(ErrorCode.USAGE, "add", "--from", "lists/list.jsonl")
    assert len(answer("list")) == 2


@pytest.mark.parametrize(
    "name",
    [
        "model.vision_tower.layers.0.fc1.weight",
        "model.embed_audio.embedding_projection.weight",  # Gemma 3n
        "thinker.visual.blocks.0.mlp.fc1.weight",  # Qwen Omni
        "model.embed_tokens_extend.image_embed.img_processor.embeddings.weight",  # Phi-4-multimodal
    ],
)
def test_a_delta_of_a_part_for_pictures_or_sound_is_refused_by_its_tensors_before_it_is_listed(
    name: str, home: Path, tmp_path: Path
) -> None:
    base = BaseSpec("eyes", "sha256:" + "a" * 64, {name: (8, 16)})
    write_delta(tmp_path / "eyes.gymdelta", [DeltaEntry.of(name, torch.ones(8, 16))], base)
    message = refusal(ErrorCode.MODEL_INVALID, "add", "eyes.gymdelta", "x.gymdelta")
    assert "eyes.gymdelta: 1 tensor cannot be served" in message
    assert name in message
    assert answer("list") == []
