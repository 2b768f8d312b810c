"""A hub where only ``requirements-hub.txt`` is installed: none of the trainer's packages, nor what comes with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode
from tests.support.one_round import ONE_ROUND
from tests.support.wait import SECONDS
from tests.support.without_packages import TRAINER, with_only

LINES = (
    (Path(__file__).resolve().parents[2] / "requirements-hub.txt").read_text(encoding="utf-8").splitlines()
)
HUB = {
    **os.environ,
    **with_only(line for line in LINES if not line.startswith("#")),
    "OMP_NUM_THREADS": "1",
}
ALL = {**os.environ, "OMP_NUM_THREADS": "1"}
ROOT_DATA = ("--set", "root.data='task:double'", "--set", "soup.aggregator=fltrust")
pytestmark = pytest.mark.slow  # four fresh processes that load torch, and a round


def words(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{module}.cli.main", *arguments, "--json"]


def run(folder: Path, module: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(module, *arguments), cwd=folder, env=env, capture_output=True, text=True, timeout=3 * SECONDS
    )


def test_the_trainer_is_really_absent() -> None:
    left_out = HUB["GYM_TESTS_WITHOUT"].split(",")
    assert {*TRAINER, "pandas", "pytest"} <= {*left_out}
    assert not {"torch", "transformers", "flwr", "gym_fed"} & {*left_out}
    done = subprocess.run([sys.executable, "-c", "import trl"], env=HUB, capture_output=True, text=True)
    assert "No module named 'trl'" in done.stderr


def test_a_hub_without_the_trainer_makes_a_round_and_refuses_to_train(tmp_path: Path) -> None:
    begun = run(
        tmp_path,
        "gym_server",
        "init",
        "--dir",
        "hub",
        "--enrolment",
        "open",
        "--base",
        "gym-nano",
        env=HUB,
    )
    assert begun.returncode == 0, begun.stderr
    checked = run(tmp_path, "gym_server", "run", "--dir", "hub", "--check", *ONE_ROUND, env=HUB)
    assert checked.returncode == 0, checked.stderr

    refused = run(tmp_path, "gym_server", "run", "--dir", "hub", "--check", *ONE_ROUND, *ROOT_DATA, env=HUB)
    assert refused.returncode == ErrorCode.MISSING_DEPENDENCY.exit_code, refused.stderr
    assert "root (an update that the hub trains) needs the package trl" in refused.stderr

    hub = subprocess.Popen(
        words("gym_server", "run", "--dir", "hub", "--exit-when-done", *ONE_ROUND),
        cwd=tmp_path,
        env=HUB,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "hub.log").open("w"),
        text=True,
    )
    try:
        assert hub.stdout is not None
        line = hub.stdout.readline()
        assert line, (tmp_path / "hub.log").read_text()[-4000:]
        address = f"127.0.0.1:{json.loads(line)['port']}"
        joined = run(
            tmp_path,
            "gym_client",
            *("join", "--server", address, "--rounds", "1", "--home", "home", "--yes", "--device", "cpu"),
            env=ALL,
        )
        assert joined.returncode == 0, joined.stderr[-4000:]
        assert hub.wait(timeout=2 * SECONDS) == 0, (tmp_path / "hub.log").read_text()[-4000:]
    finally:
        hub.kill()
        hub.wait()
    for command in (["rounds"], ["ledger", "verify"]):
        shown = run(tmp_path, "gym_server", *command, "--dir", "hub", env=HUB)
        assert shown.returncode == 0, shown.stderr
    assert "committed" in run(tmp_path, "gym_server", "rounds", "--dir", "hub", env=HUB).stdout
