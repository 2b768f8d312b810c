"""What the shell completes behind Tab, by the protocol that the shells speak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.serving.store.store import VariantStore
from tests.support.loopback_hub import some_delta


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYM_VARIANTS", str(tmp_path / "none"))


def completed(line: str) -> list[str]:
    """What bash is given for a line, whose last word is unfinished."""
    asked = {
        "_GYM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="gym", env=asked)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("gym configs copy nano-s", "nano-sft"),
        ("gym eval --suite t", "tiny"),
        ("gym eval run gym-nano --suite ", "core"),
        ("gym soup merge --rule trim", "trimmed_mean"),
        ("gym soup merge --rule ti", "ties"),
        ("gym delta encode base tuned --codec b", "bitdelta"),
        ("gym delta encode base tuned --small d", "dense"),
        ("gym export gym-nano --format gg", "gguf"),
        ("gym data generate rows.jsonl --task sh", "shout"),
        ("gym chat g", "gym-nano"),
    ],
)
def test_names_of_the_package(line: str, some: str) -> None:
    found = completed(line)
    assert some in found
    assert all(name.startswith(line.rpartition(" ")[2]) for name in found)


def test_runs_and_models_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "group/second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--org--small").mkdir(parents=True)
    (tmp_path / "cache" / "datasets--org--rows").mkdir()
    assert completed("gym runs show ") == ["runs/first", "runs/group/second"]
    assert completed("gym delta encode gym-nano runs/f") == ["runs/first"]
    assert completed("gym soup merge runs/first runs/g") == ["runs/group/second"]
    assert completed("gym chat org") == ["org/small"]
    assert completed("gym variant create --base ") == [
        "gym-nano",
        "org/small",
        "runs/first",
        "runs/group/second",
    ]


@pytest.mark.parametrize(
    "name", ["$(id)", "\\$(id)", "`id`", "a;id", "a b", "a'b", 'a"b', "a\nb", "*", "~", "\x1b[2J"]
)
def test_a_folders_name_is_never_a_command_behind_tab(name: str, tmp_path: Path) -> None:
    for folder in (name, "good_run-ü.1"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        (tmp_path / "runs" / folder / "run.json").touch()
    assert completed("gym runs show ") == ["runs/good_run-ü.1"]


def test_variants_of_the_store_that_the_line_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with VariantStore.open(tmp_path / "store", create=True, require_signature=False) as store:
        for name in ("poet", "pirate", "other"):
            store.add(some_delta(tmp_path), name=name, owner="ada")
    assert completed("gym variant show --store store p") == ["pirate", "poet"]
    assert completed("gym chat gym-nano --variants store --variant o") == ["other"]
    monkeypatch.setenv("GYM_VARIANTS", "store")
    assert completed("gym variant remove po") == ["poet"]


@pytest.mark.parametrize("line", ["gym variant show ", "gym runs show ", "gym train --unknown x "])
def test_nothing_is_reported_where_there_is_nothing(line: str, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "variants.db").write_text("no database")
    assert completed(line) == []


def test_an_earlier_name_on_the_line_is_not_warned_of() -> None:
    assert completed("gym eval run --out x --suite saf") == ["safety"]


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; from gym_fed.cli import completion as c; c.models(''); c.suites(''); c.recipes(''); c.tasks('');"
        "c.rules(''); print([name for name in ('torch', 'transformers', 'pydantic', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
