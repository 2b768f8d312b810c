"""Ctrl-C right after a command was typed, while Python still reads its modules."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode

SCRIPTS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["scripts"]
STOPPED = """
import sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Stop())
from {module} import main
main()
"""


@pytest.mark.parametrize("entry", sorted(set(SCRIPTS.values())))
def test_ctrl_c_while_modules_are_read_ends_a_command_without_a_trace(entry: str) -> None:
    code = STOPPED.format(module=entry.partition(":")[0])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (ErrorCode.INTERRUPTED.exit_code, "", "")


@pytest.mark.parametrize("entry", sorted(set(SCRIPTS.values())))
def test_an_entry_runs_its_command(entry: str) -> None:
    words = [sys.executable, "-m", entry.partition(":")[0], "--version"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "gym-fed")
