"""A program imports the command that is called, and no other; its own help imports none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gym_fed.core.help import App, LazyCommandGroup

COMMANDS = "gym_fed.cli.train.train", "gym_fed.cli.chat.command", "gym_fed.cli.soup.app"


@pytest.mark.parametrize(
    ("program", "words", "left_out"),
    [
        ("gym_fed", ["--help"], COMMANDS),
        ("gym_fed", ["soup", "--help"], COMMANDS[:2]),
        ("gym_server", ["--help"], ("sqlalchemy", "importlib.metadata")),
        ("gym_client", ["join", "--help"], ("pydantic", "sqlalchemy")),
    ],
    ids=["gym", "gym soup", "gym-server", "gym-client join"],
)
def test_help_imports_only_what_it_shows(program: str, words: list[str], left_out: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.argv = ['x', *{words}]; from {program}.cli.main import main\n"
        f"try:\n    main()\nfinally:\n    print('\\nimported', *sorted({{*{left_out}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["imported"]


class _Group(LazyCommandGroup):
    sources = {"here": f"{__name__}:here", "gone": "gym_fed.cli.no_such_module:app"}  # noqa: RUF012


def here(count: int = 1) -> None:
    """Say how often."""
    print(f"{count} times")


def test_a_lazy_command_takes_options_and_another_that_cannot_be_imported_does_not_disturb_it() -> None:
    app = App(cls=_Group)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["here", "--count", "3"])
    assert (result.exit_code, result.stdout) == (0, "3 times\n")
    assert isinstance(CliRunner().invoke(app, ["gone"]).exception, ModuleNotFoundError)
