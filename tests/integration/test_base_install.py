"""The base install, without any extra: it trains, and it joins a hub that runs on it too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.one_round import ONE_ROUND
from tests.support.wait import SECONDS
from tests.support.without_packages import with_only

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
BASE = {**os.environ, **with_only(PROJECT["dependencies"]), "OMP_NUM_THREADS": "1"}
EXTRAS_ALONE = {
    "bitsandbytes",
    "deepspeed",
    "gguf",
    "lm_eval",
    "obstore",
    "onnx",
    "opacus",
    "openai",
    "psycopg",
}
pytestmark = pytest.mark.slow  # four fresh processes that load torch, and a round


def words(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{module}.cli.main", *arguments, "--json"]


def run(folder: Path, module: str, *arguments: str) -> Any:
    """Of ``--json`` the document, or the last one of its lines."""
    done = subprocess.run(
        words(module, *arguments), cwd=folder, env=BASE, capture_output=True, text=True, timeout=3 * SECONDS
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    return json.loads(lines[-1] if lines[-1].startswith("{") else done.stdout)


def test_what_only_extras_bring_is_really_absent() -> None:
    left_out = {*BASE["GYM_TESTS_WITHOUT"].split(",")}
    assert left_out >= EXTRAS_ALONE
    assert not {"torch", "trl", "flwr", "gym_fed"} & left_out
    done = subprocess.run([sys.executable, "-c", "import opacus"], env=BASE, capture_output=True, text=True)
    assert "No module named 'opacus'" in done.stderr


def test_the_base_install_trains_and_joins_a_hub(tmp_path: Path) -> None:
    run(tmp_path, "gym_fed", "data", "generate", "--task", "double", "--num", "16", "rows.jsonl")
    trained = run(
        tmp_path,
        "gym_fed",
        *("train", "--model", "gym-nano", "--data", "rows.jsonl", "--max-steps", "2"),
        *("--set", "output_dir=run", "--set", "device=cpu"),
    )
    assert trained["steps"] == 2
    run(tmp_path, "gym_server", "init", "--dir", "hub", "--enrolment", "open")
    hub = subprocess.Popen(
        words("gym_server", "run", "--dir", "hub", "--exit-when-done", *ONE_ROUND),
        cwd=tmp_path,
        env=BASE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "hub.log").open("w"),
        text=True,
    )
    try:
        assert hub.stdout is not None
        line = hub.stdout.readline()
        assert line, (tmp_path / "hub.log").read_text()[-4000:]
        joined = run(
            tmp_path,
            "gym_client",
            *("join", "--server", f"127.0.0.1:{json.loads(line)['port']}", "--data", "rows.jsonl"),
            *("--rounds", "1", "--home", "home", "--yes", "--device", "cpu"),
        )
        assert joined["num_submitted"] == 1
        assert hub.wait(timeout=2 * SECONDS) == 0, (tmp_path / "hub.log").read_text()[-4000:]
    finally:
        hub.kill()
        hub.wait()
