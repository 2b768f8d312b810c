"""A running hub imports nothing that ``requirements-hub.txt`` leaves out, which its image lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.without_packages import with_only

ROOT = Path(__file__).resolve().parents[3]
RUNNING = """
import gym_server.cli.checks_at_start, gym_server.cli.init, gym_server.cli.run, gym_server.cli.snapshot
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.config.hub.task import TrainingRecipe

print(ALGORITHMS.type_of(TrainingRecipe().algorithm).__name__, TUNING.type_of(TrainingRecipe().finetuning).__name__)
"""


def test_a_hub_runs_and_checks_its_recipe_with_the_packages_of_its_image() -> None:
    lines = (ROOT / "requirements-hub.txt").read_text(encoding="utf-8").splitlines()
    only = with_only(line for line in lines if not line.startswith("#"))
    done = subprocess.run(
        [sys.executable, "-c", RUNNING], env={**os.environ, **only}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.split()) == 2
