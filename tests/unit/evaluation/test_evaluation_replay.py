"""Samples of a real run, run again: the same, and on a board reproduced by another key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.evaluator import Evaluator
from gym_fed.evaluation.records.document import record_id
from gym_fed.evaluation.records.rerun import compare_sample, rerun_on
from gym_fed.evaluation.records.writer import write_record
from gym_fed.evaluation.results import EvalResults

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def results() -> EvalResults:
    return Evaluator(["tiny_choice", "tiny_arithmetic"], "gym-nano", num_examples=12, num_fewshot=2).run()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))


def test_single_rows_come_out_as_they_did_among_all(results: EvalResults) -> None:
    wanted = {"tiny_choice": [11, 3], "tiny_arithmetic": [7]}
    again = rerun_on("gym-nano")(results, wanted)
    for task, numbers in wanted.items():
        before = {sample.number: sample for sample in results.tasks[task].samples}
        assert [sample.number for sample in again.tasks[task].samples] == sorted(numbers)
        for sample in again.tasks[task].samples:
            assert compare_sample(before[sample.number], sample).difference is None


def test_replay_says_same_and_an_altered_sample_differs(results: EvalResults) -> None:
    write_record(results, "evals")
    words = [
        "eval",
        "replay",
        record_id(results.identity),
        "--task",
        "tiny_choice",
        "--sample",
        "3",
        "--json",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (done.exit_code, json.loads(done.stdout)["same"]) == (0, True)
    task = results.tasks["tiny_choice"]
    altered = [replace(s, logprobs=(-1.0, *s.logprobs[1:])) for s in task.samples]
    write_record(replace(results, tasks={"tiny_choice": replace(task, samples=tuple(altered))}), "evals")
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == ErrorCode.EXPORT_DIFFERS.exit_code
    assert "log-likelihood differs" in json.loads(done.stdout)["difference"]


def test_another_home_reproduces_a_real_submission(
    results: EvalResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.submit_to_leaderboard(model_name="nano", organization="me")
    verify = ["leaderboard", "verify", "1", "--model", "gym-nano", "--json"]
    with pytest.raises(GymError, match="must be reproduced with a different key"):
        CliRunner().invoke(app, verify, catch_exceptions=False)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "another"))
    done = CliRunner().invoke(app, verify, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert (found["outcome"], found["differences"]) == ("reproduced", [])
    assert sum(map(len, found["samples"].values())) == 24


def test_a_task_that_names_a_file_is_not_opened_for_another(results: EvalResults) -> None:
    evil = replace(results.tasks["tiny_choice"], task="../../secret.yaml")
    with pytest.raises(GymError, match="is a task file"):
        rerun_on("gym-nano")(replace(results, tasks={evil.task: evil}), {evil.task: [0]})


def test_a_file_that_a_record_names_is_not_read_for_its_replay(results: EvalResults) -> None:
    Path("mine.yaml").write_text("no task file: its reading would be an error of this file")
    task = replace(results.tasks["tiny_choice"], task="mine")
    write_record(replace(results, tasks={"mine": task}, facts={"benchmarks": ["mine.yaml"]}), "evals")
    words = ["eval", "replay", record_id(results.identity), "--sample", "3"]
    with pytest.raises(GymError, match="no suite or task has the name 'mine'") as caught:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert "--task-file FILE" in (caught.value.hint or "")
    with pytest.raises(GymError, match=r"mine\.yaml"):
        CliRunner().invoke(app, [*words, "--task-file", "mine.yaml"], catch_exceptions=False)
