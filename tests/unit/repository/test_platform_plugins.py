"""Graders, trackers, formats, tasks and checks of an installed package, wherever one of ours may be named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gym_client.cli.main import app as client
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.config.hub.sections import GateConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml, load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import CHECKS, FORMATS, GRADERS, TASKS, TRACKERS
from gym_fed.data.generated import generate_with_rehearsal
from gym_fed.data.reading import load_rows
from gym_fed.tracking.experiment import Experiment
from tests.support.installed import install

HERE = "tests.support.more_platform"
POINTS = {
    "gym_fed.graders": {"polite": f"{HERE}:Polite", "plain": f"{HERE}:Plain"},
    "gym_fed.trackers": {"diary": f"{HERE}:Diary"},
    "gym_fed.formats": {"cards": f"{HERE}:Cards"},
    "gym_fed.tasks": {"echo": f"{HERE}:Echo"},
    "gym_fed.checks": {"tea": f"{HERE}:Tea"},
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (GRADERS, TRACKERS, FORMATS, TASKS, CHECKS):
        monkeypatch.setattr(kind, "_types", dict(kind._types))
    install(monkeypatch, POINTS)


def read(folder: Path, text: str) -> TrainingConfig:
    file = folder / "run.yaml"
    file.write_text(f"algorithm: grpo\n{text}", encoding="utf-8")
    return load_config(file, TrainingConfig)


def gym(*words: Any) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_a_grader_is_read_with_its_settings_and_written_again(tmp_path: Path) -> None:
    found = read(tmp_path, "graders:\n  - {grader: polite, word: thanks, weight: 2}\n  - grader: plain\n")
    first: Any = found.graders[0]
    assert (type(first).__name__, first.word, first.least, first.weight) == ("PoliteConfig", "thanks", 1, 2.0)
    file = tmp_path / "again.yaml"
    file.write_text(dump_yaml(found), encoding="utf-8")
    assert "word: thanks" in file.read_text(encoding="utf-8")
    assert load_config(file, TrainingConfig) == found


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{grader: polite, leest: 2}", "run.yaml:3:22: graders.0.leest: unknown key (did you mean 'least'?)"),
        ("{grader: polite, least: 0}", "run.yaml:3:22: graders.0.least: Input should be greater"),
        (
            "{grader: pollite, least: 2}",
            "run.yaml:3:6: graders.0.grader: unknown grader 'pollite'; did you mean 'polite'? (known: code_tests",
        ),
        ("{word: x}", "run.yaml:3:5: graders.0.grader: required, but missing"),
        ("polite", "run.yaml:3:5: graders.0: 'polite' is not a complete entry; write {grader: polite}"),
    ],
)
def test_what_is_wrong_in_an_entry_of_rewards_is_said_with_its_line(
    tmp_path: Path, entry: str, said: str
) -> None:
    with pytest.raises(GymError) as caught:
        read(tmp_path, f"graders:\n  - {entry}\n")
    assert said in caught.value.message
    assert len(caught.value.message.splitlines()) == 1


def test_settings_of_another_grader_are_refused() -> None:
    from gym_fed.evaluation.graders.exact import ExactConfig

    with pytest.raises(ValueError, match="ExactConfig is not the settings class of grader 'polite'"):
        TrainingConfig(algorithm="grpo", graders=[ExactConfig(grader="polite")])


def test_a_grader_whose_package_cannot_be_imported_is_refused_by_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, {"gym_fed.graders": {"polite": "tests.support.no_such_module:Polite"}})
    with pytest.raises(GymError, match=r"grader 'polite' of gym-more 1.2 cannot be imported") as caught:
        read(tmp_path, "graders: [{grader: polite}]\n")
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_gym_grade_calls_an_installed_grader(tmp_path: Path) -> None:
    rows, graders = tmp_path / "rows.jsonl", tmp_path / "graders.yaml"
    rows.write_text('{"prompt": "q", "completion": "please, please"}\n{"prompt": "q", "completion": "no"}\n')
    graders.write_text("graders: [{grader: polite, least: 2}, {grader: plain}]\n")
    means = gym("grade", rows, "--graders", graders, "--json")["means"]
    assert means == {"polite": 0.5, "plain": 0.5, "reward": 1.0}


def test_the_json_schema_lists_what_is_installed() -> None:
    schema = TrainingConfig.model_json_schema()
    entries = schema["properties"]["graders"]["items"]["oneOf"]
    by_name = {entry["properties"]["grader"]["const"]: entry for entry in entries}
    assert by_name.keys() == set(GRADERS.names())
    assert by_name["polite"]["properties"]["least"]["minimum"] == 1
    assert "diary" in schema["properties"]["tracking"]["items"]["enum"]
    assert {"auto", "cards"} <= set(schema["$defs"]["DataConfig"]["properties"]["format"]["enum"])


def test_an_installed_tracker_hears_of_the_figures(tmp_path: Path) -> None:
    assert read(tmp_path, "tracking: [diary]\n").tracking == ["jsonl", "tensorboard", "diary"]
    with Experiment(tmp_path / "run", trackers=["diary"]) as experiment:
        experiment.log_metrics({"loss": 0.5}, step=1)
    assert json.loads((tmp_path / "run/diary.txt").read_text()) == {"step": 1, "loss": 0.5}


def test_rows_of_an_installed_format_are_found_by_their_keys_and_converted_both_ways(tmp_path: Path) -> None:
    file, out, back = tmp_path / "cards.jsonl", tmp_path / "out.jsonl", tmp_path / "back.jsonl"
    file.write_text('{"front": "hi", "back": "ho"}\n')
    assert load_rows(file) == load_rows(file, "cards")
    assert gym("data", "convert", file, out, "--to", "messages", "--json")["num_rows"] == 1
    gym("data", "convert", out, back, "--to", "cards", "--json")
    assert json.loads(back.read_text()) == json.loads(file.read_text())
    assert gym("data", "show", file, "--format", "cards", "--json")["rows"] == 1
    assert GateConfig(heldout="x", format="cards").format == "cards"
    for program, words in ((app, ["data", "convert"]), (client, ["join"])):
        assert "cards" in CliRunner().invoke(program, [*words, "--help"], env={"COLUMNS": "200"}).output


def test_rows_that_one_of_ours_knows_stay_its_own(tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    file.write_text('{"front": "hi", "back": "ho", "text": "both"}\n')
    assert load_rows(file) == [{"text": "both"}]


def test_an_unknown_format_is_refused_in_the_hubs_file() -> None:
    with pytest.raises(
        ValueError, match=r"unknown format 'card'; did you mean 'cards'\? \(known: auto, .*cards"
    ):
        GateConfig(heldout="x", format="card")


def test_rows_of_an_installed_task_are_drawn_and_are_no_rehearsal(tmp_path: Path) -> None:
    assert "echo" in [task["name"] for task in gym("data", "tasks", "--json")]
    gym("data", "generate", tmp_path / "echo.jsonl", "--task", "echo", "--num", 20, "--json")
    rows = load_rows(tmp_path / "echo.jsonl")
    assert all(row["messages"][0]["content"].startswith("echo: ") for row in rows)
    assert read(tmp_path, "data: [{tasks: [echo], num_examples: 4}]\n").data[0].tasks == ["echo"]
    rehearsed = generate_with_rehearsal(["copy"], 60, 0.5)
    assert not any(row["messages"][0]["content"].startswith("echo") for row in rehearsed)


def test_an_unknown_task_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(
        GymError,
        match=r"run.yaml:2:17: data.0.tasks.0: unknown task 'ecko'; did you mean 'echo'\? \(known: add",
    ):
        read(tmp_path, "data: [{tasks: [ecko], num_examples: 4}]\n")


def test_gym_doctor_runs_an_installed_check() -> None:
    assert CHECKS.type_of("tea") is not None
    done = CliRunner().invoke(app, ["doctor", "--json"])
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["tea"]["remedy"] == "put the kettle on"


def test_names_help_and_default_configs_import_no_member_and_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from gym_fed.cli.main import app\n"
        "from gym_fed.config.hub.server import ServerConfig\n"
        "from gym_fed.config.train.training import TrainingConfig\n"
        "from gym_fed.core.registries import CHECKS, FORMATS, GRADERS, TASKS, TRACKERS\n"
        "TrainingConfig(), ServerConfig()\n"
        "kinds = (CHECKS, FORMATS, GRADERS, TASKS, TRACKERS)\n"
        "assert all(kind.names() for kind in kinds)\n"
        "assert CliRunner().invoke(app, ['data', 'convert', '--help']).exit_code == 0\n"
        "members = {f'{kind.package}.{name}' for kind in kinds for name in kind.own()}\n"
        "print(sorted((members | {'torch', 'transformers'}) & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
