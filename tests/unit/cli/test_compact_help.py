"""``--help`` at 80 columns: 24 lines for each program, 40 for a command, and every command in its program's list."""

from __future__ import annotations

import click
import pytest
from gym_client.cli.main import app as client
from gym_server.cli.main import app as server
from typer.main import get_command

from gym_fed.cli.main import app as gym

WIDTH = 78
"""Columns that click uses of a terminal with 80."""
PROGRAMS = {"gym": gym, "gym-server": server, "gym-client": client}


def leaves(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """The path and the help of each command below a group."""
    if not isinstance(command, click.Group):
        return [(context.command_path, command.get_help(context))]
    found = []
    for name, inner in command.commands.items():
        if not inner.hidden:
            found += leaves(inner, click.Context(inner, context, info_name=name, terminal_width=WIDTH))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_programs_help_fits_a_terminal_and_lists_every_command(name: str) -> None:
    command = get_command(PROGRAMS[name])
    assert isinstance(command, click.Group)
    lines = command.get_help(click.Context(command, info_name=name, terminal_width=WIDTH)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    words = set(" ".join(lines).replace(",", " ").split())
    assert {inner for inner, one in command.commands.items() if not one.hidden} <= words


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_commands_help_has_forty_lines_at_most(name: str) -> None:
    command = get_command(PROGRAMS[name])
    texts = leaves(command, click.Context(command, info_name=name, terminal_width=WIDTH))
    assert len(texts) > 10
    assert {path: lines for path, text in texts if (lines := len(text.splitlines())) > 40} == {}


def test_help_names_each_argument_and_option_once_and_no_bounds() -> None:
    command = get_command(gym)
    texts = dict(leaves(command, click.Context(command, info_name="gym", terminal_width=WIDTH)))
    chat = texts["gym chat"]
    assert chat.count("MODEL]  ") == 1
    assert "[default: 512]" in chat
    assert "\\[" not in chat
    assert "x>=" not in "".join(texts.values())
