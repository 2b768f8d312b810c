"""`gym variant create` and `gym variant rebase` at the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import load_model
from gym_fed.cli.variant.app import app
from gym_fed.cli.variant.create import training_overrides
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey
from tests.support.preferences import capitals

FAST = ["--steps", "2", "--set", "num_threads=1", "--set", "max_length=32", "--device", "cpu"]


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    path = tmp_path / "my.jsonl"
    rows = [{"messages": [*row["prompt"], *row["chosen"]]} for row in capitals(12, 0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_create_then_rebase_with_the_homes_own_key(tiny_base: Path, tmp_path: Path, data: Path) -> None:
    made = json.loads(
        run("create", "--data", data, "--user", "ada", "--base", tiny_base, *FAST, "--name", "mine", "--json")
    )
    assert (made["name"], made["owner"], made["signed"], made["steps"]) == ("mine", "ada", True, 2)
    assert made["judged_on"] == "2 held-out rows"
    listed = json.loads(run("show", "mine", "--json"))
    assert listed["sha256"] == made["sha256"]
    assert listed["signed_by"] == SigningKey.load(tmp_path / "home" / "key.pem").contributor

    loaded = load_model(str(tiny_base))
    loaded.model.model.norm.weight.data.mul_(1.01)
    version = tmp_path / "version-2"
    loaded.model.save_pretrained(version)
    loaded.tokenizer.save_pretrained(version)
    printed = run("rebase", "mine", "--onto", version, "--data", data, "--base", tiny_base, "--force")
    assert "variant mine (revision 2, ada's, signed)" in printed
    for figure in ("old base and variant", "new base alone", "new base and variant"):
        assert figure in printed
    assert "the same, scaled by 1\n" not in printed
    assert "2 held-out rows (conversations)" in printed
    run("verify", "mine")


def test_what_cannot_be_made_is_refused_with_nothing_written(tmp_path: Path, data: Path) -> None:
    create = ("create", "--data", data, "--user", "ada")
    for words, problem in (
        ((*create, "--method", "magic"), "method 'magic' is unknown"),
        ((*create, "--set", "finetuning=full"), "finetuning cannot be set for a variant"),
        ((*create, "--codec", "zip"), "codec 'zip' is unknown"),
        (("create", "--data", tmp_path / "none.jsonl", "--user", "ada"), "none.jsonl"),
        ((*create, "--unsigned", "--key", data), "--unsigned cannot be combined with --key"),
        (("create", "--data", data, "--user", "a b"), "is not a valid variant name"),
        (("rebase", "nobody", "--onto", "gym-nano"), "no variant"),
    ):
        with pytest.raises(GymError, match=problem):
            run(*words)
    assert not list((tmp_path / "home").rglob("*.gymdelta"))
    assert not list((tmp_path / "home").rglob("order.json"))


def test_it_says_what_was_learnt_and_how_to_try_it(tiny_base: Path, tmp_path: Path, data: Path) -> None:
    rows = [{"prompt": f"say {n}", "chosen": "aye", "rejected": "nay"} for n in range(10)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    create = ("create", "--data", data, "--base", tiny_base, *FAST, "--store", tmp_path / "own")
    done = CliRunner().invoke(app, [str(word) for word in (*create, "--user", "bo")], catch_exceptions=False)
    printed = done.stdout
    assert "trained on chat turns" in printed
    assert "preference loss on 2 held-out rows" in printed
    assert "loss of the preferred answers themselves" in printed
    own = tmp_path / "own"
    *_, before, last = done.stderr.splitlines()
    assert before.endswith(f"gym variant snippets bo --store {own}")
    assert last == f"next: gym chat {tiny_base} --variant bo --variants {own}"
    plain = CliRunner().invoke(app, [str(word) for word in (*create, "--user", "cy", "--plain")])
    assert "trained on prompts continued as bare text (as given)" in plain.stdout
    assert plain.stderr.splitlines()[-1] == f"next: gym api --base {tiny_base} --variants {own}"


def test_settings_are_those_of_gym_train() -> None:
    found = training_overrides(["lora.r=4", "lora.lora_alpha=8", "seed=3"], 7)
    assert found == {"lora": {"r": 4, "lora_alpha": 8}, "seed": 3, "max_steps": 7}
    with pytest.raises(GymError, match="to a value and as a section") as caught:
        training_overrides(["lora=4", "lora.r=2"], None)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
