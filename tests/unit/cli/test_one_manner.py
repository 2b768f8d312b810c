"""One manner in all three commands: the same option for the same thing, and its short form everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from gym_client.cli.main import app as client
from gym_server.cli.main import app as server
from typer.main import get_command

from gym_fed.cli.main import app as gym

COMMANDS = {"gym": gym, "gym-server": server, "gym-client": client}

SECOND_NAMES = {
    "--out": "--output",
    "--why": "--reason",
    "--held-out": "--heldout-share",
    "--data-format": "--format",
    "--key-file": "--key",
    "--max-examples": "--limit",
    "--listen": "--host",
    "--max-new-tokens": "--max-tokens",
}
"""Names that no option shown in ``--help`` has, and the one to use."""

SHORT = {"--output": "-o", "--yes": "-y", "--num": "-n"}
"""Short names of options; no other option has them."""


OTHER_THINGS = {
    "--accept": "consents, or go on with a restored hub",
    "--data": "rows of a file or folder; or a folder of evaluation sets",
    "--base": "a model; or, in `gym api keys`, whether a key opens the base",
    "--codec": "how an update is written; or a soup, which has forms of its own",
    "--format": "of rows, or of an exported model",
    "--heldout": "a file; or also a generated task",
    "--from": "a place of backups, or an entry",
    "--kind": "of statistics, or of ledger entries",
    "--output": "a file, or the folder of records",
    "--to": "a format, a revision, a place of backups, or an account",
    "--variant": "one of a store, or a file of one",
    "--version": "of the package, or of a hub's model",
}
"""Options under whose name commands take different things, and which; all others take one thing everywhere."""


def commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that is in ``--help``, and every group."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        if not command.hidden:
            yield from commands(command, f"{path} {name}")


ALL = [found for name, app in COMMANDS.items() for found in commands(get_command(app), name)]


def options(command: click.Command) -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden]


def test_no_option_goes_by_a_second_name_for_the_same_thing() -> None:
    names = [(path, name) for path, command in ALL for one in options(command) for name in one.opts]
    assert len(names) > 500
    assert [found for found in names if found[1] in SECOND_NAMES] == []


@pytest.mark.parametrize(("long", "short"), SHORT.items())
def test_an_option_has_its_short_name_everywhere(long: str, short: str) -> None:
    found = [(path, one.opts) for path, command in ALL for one in options(command)]
    assert [(path, names) for path, names in found if (long in names) != (short in names)] == []


def thing(option: click.Option, command: click.Command) -> str:
    """What ``--help`` shows behind an option: FILE, FOLDER, its choices, or nothing behind a flag."""
    if option.is_flag:
        return ""
    shown = option.metavar or option.type.get_metavar(option, click.Context(command)) or option.type.name
    return "FILE or FOLDER" if shown.upper() == "PATH" else shown.upper().removesuffix(" RANGE")


def test_an_option_takes_the_same_thing_in_every_command() -> None:
    found: dict[str, dict[str, list[str]]] = {}
    for path, command in ALL:
        for option in options(command):
            found.setdefault(option.opts[0], {}).setdefault(thing(option, command), []).append(path)
    several = {name: things for name, things in found.items() if len(things) > 1}
    assert {name: things for name, things in several.items() if name not in OTHER_THINGS} == {}
    assert set(several) == set(OTHER_THINGS)


def test_an_option_of_all_commands_has_one_text_of_help() -> None:
    shared = (
        "--device",
        "--adapter",
        "--columns",
        "--chat-template",
        "--dir",
        "--home",
        "--server",
        "--port",
        "--max-tokens",
        "--insecure",
        "--apply-chat-template",
        "--as-chat",
    )
    for name in (*shared, "--host", "--role", "--licence", "--ignore-unsupported", "--passphrase-file"):
        texts = {one.help for _, command in ALL for one in options(command) if one.opts[0] == name}
        assert len(texts) == 1, (name, texts)


def test_every_command_prints_json() -> None:
    leaves = [(path, command) for path, command in ALL if not hasattr(command, "commands")]
    assert [
        path for path, command in leaves if not any("--json" in one.opts for one in options(command))
    ] == []


def test_every_text_of_help_is_a_sentence() -> None:
    texts = [(path, str(command.help).split("\n\n")[0]) for path, command in ALL]
    texts += [
        (f"{path} {one.name}", str(getattr(one, "help", "")))
        for path, command in ALL
        for one in command.params
        if not getattr(one, "hidden", False) and one.name != "help"
    ]
    assert [found for found in texts if not found[1].rstrip().endswith((".", "..."))] == []


def test_help_names_what_an_option_takes_or_does() -> None:
    """``Maximum number of tokens per answer.``, not ``Of each answer.``; only prose is TEXT."""
    fragments = re.compile(r"(Of|Whose|What|How|May|Its|Most|Longest|As|Such as|Only)\b")
    shown = [(path, option, thing(option, command)) for path, command in ALL for option in options(command)]
    assert [(path, option.opts) for path, option, _ in shown if fragments.match(option.help or "")] == []
    prose = {"--prompt", "--system", "--description", "--title", "--note", "--reason"}
    assert {option.opts[0] for _, option, taken in shown if taken == "TEXT"} == prose


def test_the_help_of_every_command_begins_with_a_verb() -> None:
    no_verbs = re.compile(
        r"(The|A|An|What|Where|Who|Whether|How|Every|Your|One|Share|Personal|Training|Invites)\b"
    )
    texts = [(path, str(command.help)) for path, command in ALL if path not in COMMANDS]
    assert [path for path, text in texts if no_verbs.match(text)] == []
