"""Tables: on a terminal of 80 columns no line is longer, and in a pipe nothing is cut, coloured or drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from gym_server.cli.main import app as server
from typer.testing import CliRunner

from gym_fed.cli.main import app as gym
from gym_fed.core.console import out
from gym_fed.serving.store.store import VariantStore
from tests.support.loopback_hub import LoopbackHub, some_delta

OF_GYM = [
    "runs list",
    "variant list --store variants",
    "models list",
    "soup rules",
    "eval list",
    "configs list",
    "export --list",
    "data tasks",
    "data catalogue",
]
OF_SERVER = ["status", "rounds", "rewards", "accounts", "invites list", "variants list"]
NAME = "somebody-with-a-name-of-40-characters-ok"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "runs" / "nano-sft").mkdir(parents=True)
    (folder / "runs" / "nano-sft" / "run.json").write_text(json.dumps({"status": "finished"}))
    with VariantStore.open(folder / "variants", create=True, require_signature=False) as store:
        store.add(
            some_delta(folder), name="poet", owner="c" + "0" * 32, note="of a hundred rows of one person"
        )
    hub = LoopbackHub(folder / "hub", advertise="127.0.0.1:9443")
    hub.client(folder / "home", NAME).close()
    hub.close()
    done = CliRunner().invoke(
        server, ["invites", "create", "--dir", str(folder / "hub"), "--note", "a friend"]
    )
    assert done.exit_code == 0, done.output
    return folder


def printed(app: typer.Typer, words: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "cache"))
    folder = ["--dir", "hub"] if app is server else []
    done = CliRunner().invoke(app, [*words.split(), *folder], env={"COLUMNS": "80", "FORCE_COLOR": None})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "_force_terminal", True)
    monkeypatch.setattr(out, "_width", 80)


COMMANDS = [pytest.param(gym, words, id=f"gym {words}") for words in OF_GYM] + [
    pytest.param(server, words, id=f"gym-server {words}") for words in OF_SERVER
]


@pytest.mark.parametrize(("app", "words"), COMMANDS)
@pytest.mark.usefixtures("terminal")
def test_no_line_is_longer_than_the_terminal(
    app: typer.Typer, words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", printed(app, words, place, monkeypatch))
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("app", "words"), COMMANDS)
def test_a_pipe_gets_words_alone(
    app: typer.Typer, words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(app, words, place, monkeypatch)
    assert re.search("[\x1b…│┃━─]", text) is None
    if words in ("status", "accounts"):
        assert NAME in text
