"""Commands that look at an account load neither torch nor Flower: nobody waits seconds for a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROBE = """
import sys
from gym_client.cli.main import app
from gym_fed.core.errors import GymError
for line in ("id", "privacy", "status", "rewards", "key show", "pause", "resume", "leave"):
    try:
        app([*line.split(), "--home", "home"], standalone_mode=False)
    except GymError as error:
        assert "has never joined a hub" in str(error), (line, error)
    found = {"torch", "transformers", "flwr", "datasets"} & set(sys.modules)
    assert not found, (line, found)
print("none of them")
"""


def test_commands_that_train_nothing_load_neither_torch_nor_flower(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "none of them"
