"""The spinner: long work is named on a terminal and, by lines, without one."""

from __future__ import annotations

import io
import sys
import time
from itertools import islice

import pytest
from rich.console import Console

from gym_fed.core import progress as module
from gym_fed.core.progress import line_times, spinner
from tests.support.wait import SECONDS


def until(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed until ``text`` was."""
    printed, end = "", time.monotonic() + SECONDS
    while text not in printed:
        assert time.monotonic() < end, f"never printed: {text}"
        time.sleep(0.01)
        printed += capsys.readouterr().err
    return printed


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.02)


@pytest.mark.usefixtures("quickly")
def test_in_a_pipe_long_work_is_named_on_lines_of_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("loading [model]"):
        lines = until("\n", capsys) + until("\n", capsys)
    assert set(lines.splitlines()) == {"loading [model] (0 s)"}


@pytest.mark.usefixtures("quickly")
def test_counted_work_shows_its_count_and_how_to_skip_it_on_the_first_line_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with spinner("measuring", "--no-check skips it") as activity:
        activity.report(0, 1200)
        activity.add(1100)
        lines = until("\n", capsys) + until("\n", capsys)
    assert lines.splitlines() == [
        "measuring: 1,100 of 1,200 (0 s); --no-check skips it",
        "measuring: 1,100 of 1,200 (0 s)",
    ]


def test_in_a_pipe_a_tenth_of_the_work_is_a_line_although_the_next_one_is_not_due(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "line_times", lambda: iter([0.02, 1e6]))
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(module, "LINE_SECONDS", 0.02)
    with spinner("measuring") as activity:
        activity.report(1, 20)
        until("measuring: 1 of 20 ", capsys)
        activity.report(2, 20)
        until("measuring: 2 of 20 ", capsys)
        activity.report(3, 20)
        time.sleep(0.2)
        assert capsys.readouterr().err == "", "less than a tenth more"
        activity.report(3, 20, "answering")
        until("answering: 3 of 20 ", capsys)


def test_in_a_pipe_long_work_is_never_silent_for_more_than_thirty_seconds() -> None:
    assert list(islice(line_times(), 8)) == [1, 2, 4, 8, 16, 32, 62, 92]


@pytest.mark.usefixtures("quickly")
def test_in_a_pipe_json_has_standard_error_to_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gym", "chat", "--json"])
    with spinner("loading"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("quickly")
def test_on_a_terminal_long_work_has_a_clock_that_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(module, "err", console)
    with spinner("loading [model]"):
        end = time.monotonic() + SECONDS
        while "loading [model] (0 s)" not in screen.getvalue():
            assert time.monotonic() < end, "no clock"
            time.sleep(0.01)
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K"), "the line is gone"


def test_short_work_prints_nothing_and_its_error_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="off"), spinner("loading"):
        raise ValueError("off")
    assert capsys.readouterr().err == ""
