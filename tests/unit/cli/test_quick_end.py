"""The end of a command does not wait for Python to go through every object once more."""

from __future__ import annotations

import subprocess
import sys

_COMMAND = """
import sys
import typer
from gym_fed.core.console import run_app

class Seen:
    def __del__(self):
        print("gone through")

def command() -> None:
    seen = Seen()
    seen.itself = seen
    print("done")

app = typer.Typer()
app.command()(command)
sys.argv = ["command"]
run_app(app)
"""


def test_at_its_end_a_command_looks_for_no_cycles() -> None:
    done = subprocess.run([sys.executable, "-c", _COMMAND], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
