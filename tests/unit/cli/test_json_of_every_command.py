"""``--json``: one document on standard output, and nothing else there, of every command that ends within seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from gym_client.cli.main import app as client
from gym_server.cli.main import app as server
from typer.testing import CliRunner

from gym_fed.cli.main import app as gym
from gym_fed.serving.store.store import VariantStore
from tests.support.loopback_hub import LoopbackHub, some_delta
from tests.unit.cli.test_one_manner import ALL

APPS: dict[str, typer.Typer] = {"gym": gym, "gym-server": server, "gym-client": client}

LINES = [
    "gym doctor",
    "gym docs --no-open",
    "gym docs quickstart --print",
    "gym api keys add ada --file keys.json",
    "gym api keys list --file keys.json",
    "gym api keys remove ada --file keys.json",
    "gym configs list",
    "gym configs copy nano-sft copied.yaml",
    "gym configs validate copied.yaml --schema-only",
    "gym configs schema",
    "gym configs schema -o schema.json",
    "gym configs import theirs.yaml",
    "gym configs import theirs.yaml -o ours.yaml",
    "gym data tasks",
    "gym data catalogue",
    "gym data catalogue gsm8k",
    "gym data generate rows.jsonl --task shout --num 12",
    "gym data show rows.jsonl --num 1",
    "gym data convert rows.jsonl prompts.jsonl --to completion",
    "gym data mix rows.jsonl -o mixed.jsonl --num 4",
    "gym data dedup rows.jsonl -o single.jsonl",
    "gym data push me/rows rows.jsonl --licence CC0-1.0 --registry sets",
    "gym data list --registry sets",
    "gym data pull me/rows pulled --registry sets",
    "gym delta show some.gymdelta",
    "gym eval list",
    "gym eval show -o evals",
    "gym export --list",
    "gym models list",
    "gym grade graded.jsonl --graders graders.yaml",
    "gym runs list",
    "gym runs show runs/first",
    "gym runs compare runs/first runs/second",
    "gym soup rules",
    "gym variant list --store variants",
    "gym variant show poet --store variants",
    "gym variant history poet --store variants",
    "gym variant snippets poet --store variants",
    "gym variant verify poet --store variants --allow-unsigned",
    "gym variant add other.gymdelta --name other --user ada --unsigned --store variants",
    "gym variant gc --store variants",
    "gym webui keys add ada",
    "gym webui keys list",
    "gym webui keys remove ada",
    "gym-server init --dir new --yes",
    "gym-server status --dir hub",
    "gym-server rounds --dir hub",
    "gym-server privacy --dir hub",
    "gym-server rewards --dir hub",
    "gym-server accounts --dir hub",
    "gym-server pause --dir hub --reason lunch",
    "gym-server resume --dir hub",
    "gym-server recipe show --dir hub",
    "gym-server invites create --dir hub --count 2",
    "gym-server invites list --dir hub",
    "gym-server variants list --dir hub",
    "gym-server dashboard-keys add ada --dir hub",
    "gym-server dashboard-keys list --dir hub",
    "gym-server dashboard-keys remove ada --dir hub",
    "gym-server ledger show --dir hub",
    "gym-server ledger head --dir hub",
    "gym-server ledger verify --dir hub",
    "gym-server ledger export ledger.jsonl --dir hub",
    "gym-server ledger verify --ledger ledger.jsonl",
    "gym-server backup --dir hub --to backups --include-plain-keys",
    "gym-server check --dir hub",
    "gym-server check --backup backups",
    "gym-server gc --dir hub --dry-run",
    "gym-client id --home home",
    "gym-client install-links --print --home home",
    "gym-client privacy --home home",
    "gym-client pause --home home",
    "gym-client resume --home home",
    "gym-client key show --home home",
    "gym-client key export key.pem --home home --passphrase-file passphrase",
    "gym-client key import key.pem --home other --passphrase-file passphrase",
]
"""Run one after the other in one folder: what some write others read."""

ELSEWHERE = {
    "gym api health", "gym api usage", "gym-client ui", "gym-client uninstall", "gym-server mirror",
    "gym api serve", "gym batch", "gym chat", "gym data score", "gym delta apply", "gym delta compare",
    "gym delta encode", "gym eval compare", "gym eval fetch", "gym eval probe", "gym eval replay",
    "gym eval run", "gym leaderboard add", "gym leaderboard html", "gym leaderboard show",
    "gym leaderboard verify", "gym models pull", "gym models push", "gym models show", "gym models tag",
    "gym models verify", "gym predict", "gym runs plot", "gym soup merge", "gym soup statistics",
    "gym train", "gym tune", "gym variant create", "gym variant hub list", "gym variant hub remove",
    "gym variant pull", "gym variant push", "gym variant rebase", "gym variant receipt verify",
    "gym variant remove", "gym variant sign", "gym variant trust", "gym variant undo", "gym webui serve",
    "gym-client audit answer", "gym-client audit check", "gym-client audit list", "gym-client audit unanswered",
    "gym-client install-service", "gym-client join", "gym-client key decrypt", "gym-client key encrypt",
    "gym-client key revoke", "gym-client key rotate", "gym-client leave", "gym-client ledger compare",
    "gym-client ledger head", "gym-client ledger restored", "gym-client rewards", "gym-client status",
    "gym-client transfer", "gym-server certificate add", "gym-server certificate create",
    "gym-server audit record", "gym-server certificate request", "gym-server certificate show", "gym-server dashboard",
    "gym-server compare", "gym-server eval", "gym-server groups", "gym-server health", "gym-server invites cancel",
    "gym-server ledger attribute", "gym-server ledger replay", "gym-server ledger rescore",
    "gym-server model", "gym-server rebind",
    "gym-server recipe set", "gym-server restore", "gym-server revoke", "gym-server rollback",
    "gym-server run", "gym-server skip", "gym-server variants allow", "gym-server variants remove",
}  # fmt: skip
"""Commands that train, load a model, or need a running hub, a round or another one's files: their own tests read it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    for name in ("first", "second"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "run.json").write_text(json.dumps({"status": "finished"}))
        (folder / "runs" / name / "config.yaml").write_text("model: gym-nano\n")
        (folder / "runs" / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    delta = some_delta(folder)
    for name in ("some", "other"):
        (folder / f"{name}.gymdelta").write_bytes(delta.read_bytes())
    with VariantStore.open(folder / "variants", create=True, require_signature=False) as store:
        store.add(delta, name="poet", owner="ada")
    (folder / "theirs.yaml").write_text(
        "model_name_or_path: gym-nano\nstage: sft\ndo_train: true\ndataset: alpaca\n"
    )
    (folder / "graders.yaml").write_text("graders: [{grader: exact}]\n")
    (folder / "graded.jsonl").write_text('{"prompt": "a", "completion": "b", "answer": "b"}\n')
    (folder / "evals").mkdir()
    (folder / "passphrase").write_text("one two three four\n")
    hub = LoopbackHub(folder / "hub", advertise="127.0.0.1:9443")
    hub.client(folder / "home", "ada").close()
    hub.close()
    return folder


@pytest.mark.parametrize("line", LINES)
def test_standard_output_is_one_document(line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "cache"))
    monkeypatch.setattr(sys, "argv", [*line.split(), "--json"])
    name, *words = line.split()
    done = CliRunner().invoke(APPS[name], [*words, "--json"])
    assert done.exit_code in ((0, 1) if line == "gym doctor" else (0,)), (done.output, done.exception)
    json.loads(done.stdout)


def test_every_command_is_run_here_or_elsewhere() -> None:
    commands = {path for path, command in ALL if not hasattr(command, "commands")}
    here = {path for path in commands for line in LINES if f"{line} ".startswith(f"{path} ")}
    assert commands - here == ELSEWHERE
