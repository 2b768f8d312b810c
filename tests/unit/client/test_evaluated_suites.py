"""A contributor reads which suites a hub evaluates on, and which of them the own rows were not checked against."""

from __future__ import annotations

from pathlib import Path

import pytest
from gym_client.agent.data import evaluation_notes
from gym_client.agent.hooks import Hooks, TimeLimit
from gym_client.agent.policy import Policy
from gym_server.evaluations.runner import announced_suites

from gym_fed.config.hub.sections import GateConfig
from gym_fed.config.hub.task import TaskSpec
from gym_fed.core.errors import ErrorCode, GymError

BASE = "sha256:" + "a" * 64


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))


def spec(**changes: object) -> TaskSpec:
    values = {
        "server": "s" + "0" * 16,
        "server_round": 1,
        "base_model": "tiny",
        "base_digest": BASE,
        "version_digest": BASE,
        "max_update_bytes": 100,
        "deadline_seconds": 4e9,
    }
    return TaskSpec.model_validate({**values, **changes})


def notes(evaluated_on: dict[str, str]) -> list[str]:
    return list(evaluation_notes(evaluated_on, lambda: None))


def test_the_check_against_a_hubs_suites_counts_towards_the_policys_time() -> None:
    limit = TimeLimit(Policy(max_seconds=1e-9), Hooks())
    with pytest.raises(GymError, match=r"max_seconds \(1e-09 s\) .* during the check") as refused:
        list(evaluation_notes({"tiny": "0" * 64}, lambda: limit.require("the check")))
    assert refused.value.code is ErrorCode.POLICY_REFUSED


def test_a_hub_announces_its_suites_and_one_that_has_them_needs_no_note(tmp_path: Path) -> None:
    gate = GateConfig.model_validate({"evals": [{"suite": "tiny"}, {"suite": "tiny_capital"}]})
    announced = announced_suites(gate, tmp_path)
    assert set(announced) == {"tiny", "tiny_capital"}
    assert spec(evaluated_on=announced).model_dump(mode="json")["evaluated_on"] == announced
    assert notes(announced) == []


def test_a_task_without_evaluations_is_written_as_ever() -> None:
    assert "evaluated_on" not in spec().model_dump(mode="json")


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        ("tiny", "but its rows differ from the local copy"),
        (
            "winogrande",
            "which is missing here: your rows are not checked against it (gym eval fetch winogrande)",
        ),
        ("own.yaml", "whose rows are private: yours cannot be checked against them"),
        ("tiny_capitol", "your rows are not checked against it"),
    ],
)
def test_what_is_not_checked_is_said(suite: str, said: str) -> None:
    (note,) = notes({suite: "0" * 64})
    assert note.startswith(f"the hub evaluates on {suite}")
    assert said in note


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/tasks.yaml", "a b", "x" * 200, ""])
def test_a_name_that_is_a_path_is_refused_with_the_task(name: str) -> None:
    with pytest.raises((GymError, ValueError)):
        spec(evaluated_on={name: "0" * 64})


def test_a_file_on_this_machine_is_never_read_for_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_x.yaml").write_text("task: [")
    (note,) = notes({"tiny_x.yaml": "0" * 64})
    assert "whose rows are private" in note
