"""Questions on the terminal."""

from __future__ import annotations

import signal

import click
import pytest
from gym_client.cli import terminal


def test_ctrl_c_at_a_question_ends_the_command_though_a_run_would_first_stop_at_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))

    def typed(prompt: str = "") -> str:
        signal.raise_signal(signal.SIGINT)
        return "y"

    monkeypatch.setattr("click.termui.visible_prompt_func", typed)
    monkeypatch.setattr("typer.confirm", lambda question, err: click.confirm(question, err=err))
    try:
        with pytest.raises(click.exceptions.Abort):
            terminal._answer("Fetch it?")
        assert asked == []
        signal.raise_signal(signal.SIGINT)
        assert asked == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
