"""Progress of long work: lines where there is no terminal, a bar on one."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console
from rich.text import Text

from gym_fed.core import progress
from gym_fed.core.progress import progress_bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set by the test."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_stage_gets_a_line_when_it_begins_and_then_one_every_few_seconds(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    reports = (
        (0, "loading", 0, 0), (1, "quantising", 0, 30), (2, "quantising", 1, 30), (7, "quantising", 6, 30),
        (8, "reading", 0, 0),
    )  # fmt: skip
    with progress_bar() as update:
        for second, stage, done, total in reports:
            clock[0] = float(second)
            update(done, total, description=stage)
    assert capsys.readouterr().err.splitlines() == [
        "loading ...", "quantising ...", "quantising: 6 of 30", "reading ...",
    ]  # fmt: skip


def test_lines_show_bytes_with_their_unit_and_the_note_and_none_comes_early(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with progress_bar("downloading", 4_000_000, unit="bytes") as update:
        for second, done in ((4.9, 1_000_000), (5.0, 2_000_000), (9.9, 3_000_000)):
            clock[0] = second
            update(done, note="from [red]here")
    assert capsys.readouterr().err.splitlines() == ["downloading: 2.0 MB of 4.0 MB  from [red]here"]


@pytest.mark.parametrize(("shown", "lines"), [(False, True), (True, False)])
def test_nothing_is_printed_without_a_terminal_if_lines_are_off(
    shown: bool, lines: bool, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with progress_bar("merging", 3, shown=shown, lines=lines) as update:
        clock[0] = 60.0
        update(1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_stage_count_and_note_and_the_next_stage_counts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress, "err", Console(file=screen, force_terminal=True, width=100))
    with progress_bar("loading", 7, keep=True) as update:
        update(7, note="[red]")
        update(2, 9, description="writing", note="loss 0.5")
    frames = Text.from_ansi(screen.getvalue()).plain.split("writing")
    assert "2/9" in frames[-1]
    assert "loss 0.5" in frames[-1]
