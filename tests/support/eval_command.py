"""`gym eval` in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import GymError


def run(*words: str) -> Any:
    done = CliRunner().invoke(app, ["eval", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def evaluated(*words: str) -> Any:
    return json.loads(run(*words, "--json").stdout)


def refused(*words: str) -> GymError:
    done = CliRunner().invoke(app, ["eval", *words])
    assert isinstance(done.exception, GymError), done.output
    return done.exception
