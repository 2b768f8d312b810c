"""Names of commands: one verb for one act in all three commands, and earlier names that still work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from gym_client.cli.main import app as client
from gym_server.cli.main import app as server
from typer.main import get_command
from typer.testing import CliRunner

from gym_fed.cli.main import app as gym

COMMANDS = {"gym": gym, "gym-server": server, "gym-client": client}
SECOND_VERBS = {
    "list": {"ls"},
    "show": {"inspect", "cat", "info", "describe"},
    "copy": {"cp"},
    "remove": {"rm", "delete", "del"},
    "create": {"new", "make", "invite"},
    "push": {"upload", "publish"},
    "pull": {"download", "fetch"},
    "encode": {"diff"},
}
OLD = [
    ("gym", ["configs", "ls"], "gym configs list"),
    ("gym", ["configs", "cp", "nano-sft", "DIR"], "gym configs copy"),
    ("gym", ["data", "inspect", "DIR/absent.jsonl"], "gym data show"),
    ("gym", ["delta", "inspect", "DIR/absent.gymdelta"], "gym delta show"),
    ("gym", ["delta", "diff", "DIR/base", "DIR/tuned", "-o", "DIR/d"], "gym delta encode"),
    ("gym-server", ["invite", "--dir", "DIR/absent"], "gym-server invites create"),
    ("gym", ["delta", "encode", "DIR/base", "DIR/tuned", "-o", "DIR", "--force"], "--overwrite"),
    ("gym", ["eval", "show", "x", "--out", "DIR"], "--output"),
    ("gym", ["data", "mix", "DIR/a.jsonl", "--out", "DIR/b.jsonl"], "--output"),
    ("gym", ["delta", "encode", "DIR/base", "DIR/tuned", "-o", "DIR/d", "--method", "int8"], "--codec"),
    ("gym", ["delta", "compare", "DIR/base", "DIR/tuned", "DIR/d", "--max-examples", "3"], "--limit"),
    ("gym", ["data", "list", "--store", "DIR/sets"], "--registry"),
    ("gym", ["eval", "fetch", "nosuch", "--home", "DIR"], "--sets"),
    ("gym-server", ["ledger", "verify", "--file", "DIR/absent"], "--ledger"),
    ("gym-server", ["ledger", "verify", "--dir", "DIR/absent", "--server", "s0"], "--server-id"),
    (
        "gym-server",
        ["dashboard", "--dir", "DIR/absent", "--listen", "127.0.0.1:0"],
        "--host HOST --port PORT",
    ),
    ("gym-client", ["join", "--home", "DIR", "--data-format", "text"], "--format"),
    ("gym-client", ["key", "revoke", "--home", "DIR", "--key-file", "DIR/absent", "--yes"], "--key"),
    ("gym", ["variant", "pull", "x", "--owner", "c0", "--home", "DIR"], "--user"),
    (
        "gym",
        ["variant", "create", "--user", "ada", "--data", "DIR/none", "--base-model", "gym-nano"],
        "--base",
    ),
    ("gym", ["chat", "DIR/absent", "--max-new-tokens", "1"], "--max-tokens"),
    ("gym", ["grade", "DIR/absent", "--graders", "exact", "--max-new-tokens", "1"], "--max-tokens"),
    ("gym-client", ["join", "--home", "DIR", "--base-model", "DIR/absent"], "--base"),
    ("gym-server", ["init", "--dir", "DIR/hub", "--yes", "--base-model", "DIR/absent"], "--base"),
    (
        "gym-server",
        ["invites", "create", "--dir", "DIR/absent", "--valid-hours", "24"],
        "--expires-days DAYS",
    ),
]


def commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, f"{path} {name}")
    else:
        yield path, group


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_in_help_goes_by_a_second_verb_for_the_same_act(name: str) -> None:
    shown = [path for path, command in commands(get_command(COMMANDS[name]), name) if not command.hidden]
    assert len(shown) > 5
    second = set().union(*SECOND_VERBS.values())
    # `gym eval fetch` brings rows of many places together by a lock file; what is pulled has one source and a version.
    assert [path for path in shown if path.split()[-1] in second and path != "gym eval fetch"] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_begins_with_a_verb(name: str) -> None:
    no_verbs = re.compile(
        r"(The|A|An|What|Where|Who|Whether|How|Every|Your|One|Share|Personal|Training|Invites)\b"
    )
    root = get_command(COMMANDS[name])
    assert isinstance(root, click.Group)
    groups = [
        (f"{name} {one}", found) for one, found in root.commands.items() if isinstance(found, click.Group)
    ]
    shown = [(path, str(command.help)) for path, command in [*groups, *commands(root, name)]]
    assert [path for path, text in shown if no_verbs.match(text)] == []


@pytest.mark.parametrize(("command", "words", "new"), OLD, ids=lambda value: " ".join(value[:2]))
def test_an_old_name_runs_the_command_and_warns_with_the_new_one(
    command: str, words: list[str], new: str, tmp_path: Path
) -> None:
    app: typer.Typer = COMMANDS[command]
    done = CliRunner().invoke(app, [word.replace("DIR", str(tmp_path)) for word in words])
    assert done.exit_code != 2, done.output  # not click's refusal of an unknown command
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert f"is now `{new}`" in line


def test_an_old_copy_command_writes_the_recipe(tmp_path: Path) -> None:
    assert CliRunner().invoke(gym, ["configs", "cp", "nano-sft", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "nano-sft.yaml").is_file()
