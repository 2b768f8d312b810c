"""`gym eval show` and `compare`, and `gym leaderboard`, as a person or a program calls them."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed.cli.evaluation.records import _outcome
from gym_fed.cli.main import app
from gym_fed.core.console import TextConsole
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.records.writer import write_record
from gym_fed.trust.identity.keys import SigningKey
from tests.support.evaluations import choice_task, results_of

RIGHT, WRONG = [True] * 8 + [False] * 2, [True] * 2 + [False] * 8


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    good = results_of(choice_task("wet", RIGHT), model="good")
    bad = results_of(choice_task("wet", WRONG), model="bad", digest="c" * 64)
    return [write_record(results, "evals").stem for results in (good, bad)]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_records_are_listed_and_shown_with_their_samples(records: list[str]) -> None:
    listed = json.loads(run("eval", "show", "--json"))
    assert {one["id"]: one["figures"] for one in listed} == {
        records[0]: {"wet/acc": 0.8},
        records[1]: {"wet/acc": 0.2},
    }
    shown = json.loads(run("eval", "show", records[0][:8], "--samples", "1", "--json"))
    assert shown["tasks"]["wet"]["figures"]["acc"]["stderr"] == 0.05
    assert [sample["number"] for sample in shown["tasks"]["wet"]["samples"]] == [0]
    assert "is water wet?" in run("eval", "show", records[0], "--samples", "1")


def test_a_damaged_record_does_not_hide_the_others(records: list[str]) -> None:
    (damaged,) = Path("evals").rglob(f"{records[0]}.json")
    damaged.write_text("{")
    assert [one["id"] for one in json.loads(run("eval", "show", "--json"))] == [records[1]]


def test_two_records_are_compared_with_interval_and_p(records: list[str]) -> None:
    found = json.loads(run("eval", "compare", *records, "--json"))["tasks"]["wet"]["metrics"]["acc"]
    assert found["difference"] == pytest.approx(0.6)
    assert (found["first_only"], found["second_only"]) == (6, 0)
    assert found["lower"] > 0
    assert found["mcnemar_p"] == pytest.approx(0.03125)
    assert "+0.6000" in run("eval", "compare", *records)


def test_a_record_goes_on_a_board_and_its_page(records: list[str]) -> None:
    run("leaderboard", "add", records[0], "--model-name", "good", "--organization", "me")
    (shown,) = json.loads(run("leaderboard", "show", "--json"))["submissions"]
    assert (shown["status"], shown["model_name"]) == ("self-reported", "good")
    run("leaderboard", "html", "board.html")
    assert "self-reported" in Path("board.html").read_text()


def test_a_board_is_refused_where_its_head_was_another(records: list[str]) -> None:
    run("leaderboard", "add", records[0], "--model-name", "good", "--organization", "me")
    with pytest.raises(GymError, match="lines are missing at the end") as caught:
        run("leaderboard", "show", "--head", "0" * 64)
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_a_board_is_signed_with_the_key_that_is_named(records: list[str], tmp_path: Path) -> None:
    key = SigningKey.generate()
    key.save(tmp_path / "k.pem")
    words = ("--model-name", "good", "--organization", "me", "--key", str(tmp_path / "k.pem"))
    run("leaderboard", "add", records[0], *words)
    assert json.loads(run("leaderboard", "show", "--json"))["submissions"][0]["signer"] == key.contributor


def test_tasks_of_a_group_are_shown_as_their_mean_and_what_is_left_out_is_counted(records: list[str]) -> None:
    own = [choice_task(f"own_task_number_{number}", RIGHT) for number in range(12)]
    group = (choice_task("mmlu_anatomy", RIGHT), choice_task("mmlu_virology", WRONG[:2] * 5 + WRONG[2:]))
    record = write_record(results_of(*group, *own, model="many", digest="d" * 64), "evals").stem
    line = next(line for line in run("eval", "show").splitlines() if "many" in line)
    mean = (8 + 10) / (10 + 18)
    assert f"mmlu (2 tasks)/acc {mean:.4f}, own_task_number_0/acc 0.8000" in line
    shown, left = line.count("own_task"), int(line.partition(", and ")[2].partition(" more")[0])
    assert (shown + left, "…" in line) == (12, False)
    (whole,) = [line for line in run("eval", "show", record).splitlines() if "mmlu (2 tasks)" in line]
    assert f"{mean:.4f}" in whole
    run("leaderboard", "add", record, "--model-name", "many", "--organization", "me")
    assert f"mmlu (2 tasks) {mean:.4f} acc (n=28), own_task_number_0" in run("leaderboard", "show")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_list_of_suites_fits_a_terminal_and_is_whole_in_a_pipe(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    console = TextConsole()
    monkeypatch.setattr(console, "_force_terminal", is_terminal)
    console.file, console.width = StringIO(), 80
    monkeypatch.setattr("gym_fed.core.console.out", console)
    run("eval", "list")
    lines = console.file.getvalue().splitlines()
    assert (max(map(len, lines)) <= 80) is is_terminal


def test_a_replay_says_whether_the_answer_is_the_same_and_up_to_where() -> None:
    assert _outcome("another answer", None, 0.0) == "differs: another answer"
    assert "the same up to token 3" in _outcome(None, 3, 0.0)
    assert _outcome(None, None, 0.5) == "the same; log-likelihoods within 0.5 nats"
