"""`gym eval` as a process: killed midway or stopped by Ctrl-C, the same command goes on at the sample."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.evaluation.records.document import samples_path
from gym_fed.evaluation.scoring.local import LocalScorer
from tests.support import warm
from tests.support.hub import BIN
from tests.support.wait import SECONDS

WORDS = ("gym-nano", "--tasks", "tiny_cloze,tiny_reverse,tiny_capital")
NUM_SCORED, NUM_ANSWERED = 60 * 4, 24


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many results the models of this process were asked for."""
    counted = {"scored": 0, "answered": 0}
    scored, answered = LocalScorer.loglikelihoods, LocalScorer.answers

    def loglikelihoods(self: LocalScorer, continuations: Any, done: Any = ()) -> Any:
        counted["scored"] += len(continuations) - len(done)
        return scored(self, continuations, done)

    def answers(self: LocalScorer, prompts: Any) -> Any:
        counted["answered"] += len(prompts)
        return answered(self, prompts)

    monkeypatch.setattr(LocalScorer, "loglikelihoods", loglikelihoods)
    monkeypatch.setattr(LocalScorer, "answers", answers)
    return counted


def evaluate(folder: str) -> Any:
    done = CliRunner().invoke(app, ["eval", *WORDS, "--output", folder, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["runs"]
    return run, done.stderr


def samples(run: Any) -> list[Any]:
    return [json.loads(line) for line in samples_path(Path(run["file"])).read_text().splitlines()]


@pytest.mark.parametrize(
    ("kill_after", "scored", "answered"), [(101, 139, 24), pytest.param(250, 0, 14, marks=pytest.mark.slow)]
)
def test_a_killed_evaluation_goes_on_and_has_the_samples_of_an_unbroken_one(
    kill_after: int, scored: int, answered: int, asked: dict[str, int]
) -> None:
    whole, _ = evaluate("whole")
    assert asked == {"scored": NUM_SCORED, "answered": NUM_ANSWERED}
    killed = warm.run(
        [BIN / "gym", "eval", *WORDS, "--output", "broken"],
        env={**os.environ, "GYM_FAILPOINTS": f"evaluated-request:{kill_after}"},
        timeout=SECONDS,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not list(Path("broken").rglob("*.json"))

    asked.update(scored=0, answered=0)
    again, said = evaluate("broken")
    assert asked == {"scored": scored, "answered": answered}
    assert f"reusing {kill_after} of {NUM_SCORED + NUM_ANSWERED} requests, computed by an earlier run" in said
    assert again["id"] == whole["id"]
    assert again["tasks"] == whole["tasks"]
    for before, after in zip(samples(whole), samples(again), strict=True):
        if "margins" in before["metadata"]:  # of tokens whose batch had other requests in it
            margins = [json.loads(one["metadata"].pop("margins")) for one in (before, after)]
            assert margins[1] == pytest.approx(margins[0], abs=1e-4)
        assert after == before
    assert not list((Path("broken") / ".running").iterdir())


def test_ctrl_c_ends_an_evaluation_with_how_to_go_on() -> None:
    words = [BIN / "gym", "eval", "gym-nano", "--suite", "tiny", "--output", "stopped"]
    with Path("said").open("wb") as said:
        process = warm.WarmProcess(words, stdout=subprocess.DEVNULL, stderr=said, env=dict(os.environ))
    try:
        end = time.monotonic() + SECONDS
        while not any(file.stat().st_size for file in Path("stopped").rglob("*.jsonl")):
            assert process.poll() is None, Path("said").read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130, Path("said").read_text()
    finally:
        process.kill()
    text = Path("said").read_text()
    assert "error (interrupted): stopped after " in text
    assert "run the same command to resume" in text
    assert list((Path("stopped") / ".running").iterdir())
