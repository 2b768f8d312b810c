"""Questions on the terminal."""

from __future__ import annotations

import signal

import click
import pytest
from gym_client.cli import terminal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_a_question_ends_the_command_though_a_run_would_first_stop_at_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    asked: list[int] = []
    before = signal.signal(number, lambda number, frame: asked.append(number))

    def typed(prompt: str = "") -> str:
        signal.raise_signal(number)
        return "y"

    monkeypatch.setattr("click.termui.visible_prompt_func", typed)
    monkeypatch.setattr("typer.confirm", lambda question, err: click.confirm(question, err=err))
    try:
        with pytest.raises(click.exceptions.Abort):
            terminal._answer("Fetch it?")
        assert asked == []
        signal.raise_signal(number)
        assert asked == [number]
    finally:
        signal.signal(number, before)
