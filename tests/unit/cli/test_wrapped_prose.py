"""What commands say on a terminal is broken between words; a command in it stays one line that can be copied."""

from __future__ import annotations

import io
import re

import pytest

from gym_fed.core import console
from gym_fed.core.console import TextConsole, report_error
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import wrapped

PROSE = "the hub names a base model that this machine does not have, and fetching it needs your consent first"
COMMAND = "gym-client join --server hub.example.org:9443 --accept terms:0123456789abcdef"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 60 columns, as standard error."""
    shown = io.StringIO()
    terminal = TextConsole(stderr=True)
    terminal.file, terminal._force_terminal, terminal.width = shown, True, 60
    monkeypatch.setattr(console, "err", terminal)
    return shown


def test_lines_end_between_words_and_keep_their_indent() -> None:
    lines = wrapped(f"  {PROSE}", 40).split("\n")
    assert max(map(len, lines)) <= 40
    assert all(line.startswith("  ") and not line.startswith("   ") for line in lines)
    assert " ".join(line.strip() for line in lines) == PROSE
    assert wrapped(f"short\n{PROSE}\n\n", 200) == f"short\n{PROSE}\n\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_command_is_never_broken(width: int) -> None:
    lines = wrapped(f"to accept exactly this: {COMMAND}", width).split("\n")
    assert [line for line in lines if COMMAND in line]
    assert " ".join(lines) == f"to accept exactly this: {COMMAND}"


def test_an_error_on_a_terminal_is_broken_between_words(screen: io.StringIO) -> None:
    report_error(GymError(ErrorCode.USAGE, PROSE, f"say yes: {COMMAND}"))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert lines[0].startswith("error (usage): the hub names")
    assert max(len(line) for line in lines if COMMAND not in line) <= 60
    assert f"  {COMMAND}" in lines
    assert " ".join(line.strip() for line in lines).startswith(f"error (usage): {PROSE} say yes:")


def test_what_goes_to_a_pipe_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.err.print(PROSE * 3)
    assert capsys.readouterr().err == f"{PROSE * 3}\n"


def test_a_column_of_reasons_goes_on_below_itself(screen: io.StringIO) -> None:
    console.print_columns([("learning_rate", "0.0002", PROSE)], wrapped=True, to=console.err)
    lines = screen.getvalue().splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
    assert all(line.startswith(" " * 25) for line in lines[1:])
