"""Members of installed packages that cannot be used: named in two lines, and in nobody else's way."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from gym_quant.codec import Codec
from gym_quant.registry import CODECS, MemberError
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import AGGREGATORS, CHECKS, FORMATS, GRADERS, TASKS
from gym_fed.core.system_errors import system_error
from gym_fed.data.formats.base import Format
from gym_fed.data.generated import generate_with_rehearsal
from gym_fed.data.reading import format_of, iter_rows
from gym_fed.doctor.check import Check, Level, run_checks
from gym_fed.doctor.checks.plugins import judge_plugin
from gym_fed.evaluation.graders.base import Grader
from gym_fed.soup.aggregator import CoordinateRule
from tests.support.installed import install

HERE = "tests.unit.repository.test_plugins_broken"
LOST = "tests.unit.no_such_module:Lost"


class Half(Codec):
    """Lacks all but one of the methods that a codec must have."""

    name = "half"

    def encode(self, tensor: Any, **params: Any) -> Any:
        """Nothing comes of it."""


class Middle(CoordinateRule):
    """Half way between the extremes.

    Its module's docstring speaks of other things.
    """

    name = "middle"
    robust = False

    def _aggregate(self, updates: Any, weights: Any) -> Any:
        return (updates.amin(dim=0) + updates.amax(dim=0)) / 2


class Odd(Grader):
    """Its settings are not those of a grader."""

    Settings: Any = dict

    def grade(self, samples: Any) -> Any:
        """Nothing comes of it."""


class Cards(Format):
    """Front and back of a card."""

    name = "cards"

    @classmethod
    def matches(cls, row: Any) -> bool:
        return "front" in row

    def read(self, row: Any) -> Any:
        return {"prompt": row["front"], "completion": row["back"]}


class Falls(Check):
    """Raises when it runs."""

    name = "falls"

    def findings(self) -> Any:
        raise OSError("no such bus")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (CODECS, AGGREGATORS, FORMATS, GRADERS, TASKS, CHECKS):
        monkeypatch.setattr(kind, "_types", dict(kind._types))
    install(
        monkeypatch,
        {
            "gym_fed.codecs": {"half": f"{HERE}:Half", "lost": LOST},
            "gym_fed.aggregators": {"lost": LOST, "middle": f"{HERE}:Middle"},
            "gym_fed.formats": {"lost": LOST, "cards": f"{HERE}:Cards"},
            "gym_fed.graders": {"lost": LOST, "baseless": f"{HERE}:Middle", "odd": f"{HERE}:Odd"},
            "gym_fed.tasks": {"lost": LOST},
            "gym_fed.algorithms": {"lost": LOST},
            "gym_fed.tuning": {"lost": LOST},
            "gym_fed.features": {"gone": LOST},
            "gym_fed.checks": {"lost": LOST, "falls": f"{HERE}:Falls"},
        },
    )


def gym(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400"})


def test_a_codec_without_a_required_method_is_refused_by_what_it_lacks() -> None:
    with pytest.raises(
        MemberError, match=r"codec 'half' of gym-more 1\.2: .*:Half lacks check, decode_rows, norm,"
    ):
        CODECS.type_of("half")
    finding = judge_plugin(CODECS, "half")
    assert finding.level is Level.FAIL
    assert "lacks check" in finding.finding


@pytest.mark.parametrize("name", ["half", "lost"])
def test_a_codec_that_cannot_be_used_ends_a_command_with_two_lines(
    tiny_base: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "d.gymdelta"
    error = gym("delta", "encode", tiny_base, tiny_base, "-o", out, "--codec", name).exception
    assert isinstance(error, Exception)
    said = system_error(error)
    assert isinstance(said, GymError)
    assert said.code is ErrorCode.MISSING_DEPENDENCY
    assert f"codec '{name}' of gym-more 1.2" in said.message
    assert "repair or remove gym-more" in said.message
    assert not out.exists()


def test_the_list_of_rules_goes_on_without_what_cannot_be_imported(caplog: pytest.LogCaptureFixture) -> None:
    done = gym("soup", "rules")
    assert done.exit_code == 0, done.exception
    assert "left out: aggregator 'lost' of gym-more 1.2 cannot be imported" in caplog.text
    assert "krum" in done.stdout


def test_the_schema_leaves_out_graders_that_cannot_be_used_and_a_warning_names_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = gym("configs", "schema")
    assert done.exit_code == 0, done.exception
    entries = json.loads(done.stdout)["properties"]["graders"]["items"]["oneOf"]
    assert {entry["properties"]["grader"]["const"] for entry in entries} == set(GRADERS.own())
    for said in (
        "grader 'lost' of gym-more 1.2 cannot be imported",
        f"grader 'baseless' of gym-more 1.2: {HERE}:Middle is not a Grader",
        "grader 'odd': its Settings is not a GraderConfig",
    ):
        assert f"left out: {said}" in caplog.text


@pytest.mark.parametrize("name", ["lost", "baseless", "odd"])
def test_a_grader_that_cannot_be_used_is_refused_where_a_config_names_it(name: str) -> None:
    with pytest.raises(GymError, match=f"grader '{name}'") as caught:
        TrainingConfig(algorithm="grpo", graders=[{"grader": name}])  # type: ignore[list-item]
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (
            "output_dir: lost\nalgorithm: lost\n",
            ":2:1: algorithm: algorithm 'lost' of gym-more 1.2 cannot be",
        ),
        ("model: x\nfinetuning: lost\n", ":2:1: finetuning: tuning method 'lost' of gym-more 1.2 cannot"),
        ("output_dir: gone\ngone: true\n", ":2:1: gone: feature 'gone' of gym-more 1.2 cannot be imported"),
        (
            "algorithm: grpo\ngraders:\n- {grader: exact}\n- weight: 2\n  grader: lost\n",
            ":5:3: graders.1.grader: grader 'lost' of gym-more 1.2 cannot be imported",
        ),
        (
            "graders: [{grader: odd}]\n",
            ":1:12: graders.0.grader: grader 'odd': its Settings is not a GraderConf",
        ),
    ],
)
def test_a_member_that_cannot_be_used_is_refused_with_file_and_line(
    tmp_path: Path, text: str, place: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(GymError) as caught:
        load_config(file, TrainingConfig)
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    assert caught.value.message.startswith(f"{file}{place}")
    assert caught.value.hint.startswith("repair or remove ")


def test_a_member_of_the_command_line_that_cannot_be_used_is_refused_with_the_option(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: x\n")
    with pytest.raises(
        GymError, match=r"^--set: algorithm: algorithm 'lost' of gym-more 1\.2 cannot"
    ) as caught:
        load_config(file, TrainingConfig, ["algorithm=lost"])
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_tasks_are_listed_and_rehearsed_without_one_that_cannot_be_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = gym("data", "tasks", "--json")
    assert done.exit_code == 0, done.exception
    assert [task["name"] for task in json.loads(done.stdout)] == list(TASKS.own())
    assert "left out: task 'lost' of gym-more 1.2 cannot be imported" in caplog.text
    assert len(generate_with_rehearsal(["copy"], 4, 0.5)) == 4


def test_a_check_that_cannot_be_imported_or_raises_ends_no_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKS, "own", lambda: ("plugins",))
    found = {finding.check: finding for finding in run_checks()}
    assert "cannot be imported" in found["plug-in: check lost"].finding
    assert "does not run: OSError('no such bus')" in found["check of a plug-in: falls"].finding
    assert found["plug-in: codec half"].level is Level.FAIL


def test_a_rule_of_a_module_without_a_docstring_is_listed_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(HERE), "__doc__", None)
    done = gym("soup", "rules")
    assert done.exit_code == 0, done.exception
    assert "Half way between the extremes." in done.stdout


def test_a_format_that_cannot_be_imported_is_in_the_way_of_no_row(caplog: pytest.LogCaptureFixture) -> None:
    assert type(format_of({"text": "to be"})).__name__ == "Text"
    assert not caplog.text  # no package was asked
    assert type(format_of({"front": "to be", "back": "or not"})).__name__ == "Cards"
    assert "left out: format 'lost' of gym-more 1.2 cannot be imported" in caplog.text
    with pytest.raises(GymError, match=r"format .lost. of gym-more 1\.2 cannot be imported"):
        list(iter_rows("rows.jsonl", "lost"))


@pytest.mark.parametrize("words", [("delta", "encode"), ("soup", "merge"), ("variant", "create")])
def test_help_lists_the_codecs(words: tuple[str, ...]) -> None:
    assert "int4, int8, lattice, lora, lost, sparse_sign, ternary)" in " ".join(
        gym(*words, "--help").output.split()
    )
