"""An option of a command that is written before the command."""

from __future__ import annotations

import sys

import pytest
import typer
from gym_client.cli.main import app as client
from gym_server.cli.main import app as server

from gym_fed.core.console import run_app


@pytest.mark.parametrize(
    ("app", "words", "remedy"),
    [
        (client, ["gym-client", "--home", "x", "join"], "gym-client join --home"),
        (client, ["gym-client", "--home", "x", "transfer"], "gym-client transfer --home"),
        (server, ["gym-server", "--dir", "x", "status"], "gym-server status --dir"),
    ],
)
def test_an_option_before_its_command_is_refused_with_the_right_order(
    app: typer.Typer,
    words: list[str],
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        run_app(app)

    printed = capsys.readouterr().err
    assert remedy in printed
    assert "did you mean" not in printed
