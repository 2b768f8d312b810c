"""Consent at the command line, for models and for data sets of the Hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from gym_fed.base.downloads import ensure_dataset, missing_model
from gym_fed.base.downloads.config_needs import models_of
from gym_fed.base.downloads.offer import offer_dataset
from gym_fed.cli.models.needed import ensure_datasets, ensure_models, require_rows
from gym_fed.config.train.data_source import DataConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.model_hub import ModelHub, Repo
from tests.unit.base.downloads.conftest import NAME

ROWS = "acme/rows"


@pytest.fixture
def rows(hub: ModelHub) -> Repo:
    """A data set of two subsets."""
    line = json.dumps({"prompt": "1+1", "completion": "2"}).encode() + b"\n"
    hub.repos[ROWS] = Repo(
        {"README.md": b"rows", "main/train.jsonl": line * 3, "socratic/train.jsonl": line * 5},
        kind="dataset",
        card={"license": "mit"},
    )
    return hub.repos[ROWS]


def test_without_a_terminal_and_yes_the_error_has_bytes_licence_and_command(hub: ModelHub) -> None:
    with pytest.raises(GymError) as raised:
        ensure_models([NAME], yes=False)
    assert raised.value.code is ErrorCode.MODEL_NOT_FOUND
    assert "kB in" in raised.value.message
    assert "licence: apache-2.0" in raised.value.message
    assert "--yes" in raised.value.hint
    assert f"gym models pull {NAME} --yes" in raised.value.hint
    assert missing_model(NAME)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": None}, "model: not set"),
        ({"data": []}, "data: no rows to train on"),
        ({"data": [{"path": "absent.jsonl"}]}, "no data file at absent.jsonl"),
        ({"eval_data": [{"path": "empty.jsonl"}]}, "empty.jsonl contains no rows"),
        ({"data": [{"path": "odd.csv"}]}, "odd.csv:2: no known format"),
    ],
)
def test_a_run_without_usable_rows_is_refused_before_a_model_is_loaded(
    changes: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    Path("odd.csv").write_text("Frage,Antwort\n1+1,2\n")
    Path("good.jsonl").write_text('{"text": "a"}\n')
    good: dict[str, Any] = {"model": "gym-nano", "data": [{"path": "good.jsonl"}]}
    require_rows(TrainingConfig(**good))
    with pytest.raises(GymError, match=problem):
        require_rows(TrainingConfig(**{**good, **changes}))


def test_yes_fetches_once_and_shows_what(hub: ModelHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert ensure_models([NAME, None, "gym-nano", NAME], yes=True) is True
    assert capsys.readouterr().err.count(f"{NAME} from {hub.url}") == 1
    assert ensure_models([NAME], yes=False) is False


def test_the_machine_that_is_asked_is_named_before_it_answers(
    hub: ModelHub, rows: Repo, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure_models(["gym-nano"], yes=True)
    assert capsys.readouterr().err == ""
    for ask in (
        lambda: ensure_models(["acme/absent"], yes=True),
        lambda: ensure_datasets([DataConfig(hub="acme/absent")], yes=True),
    ):
        with pytest.raises(GymError):
            ask()
        assert capsys.readouterr().err == f"asking {hub.url} for acme/absent ...\n"


@pytest.mark.parametrize("answer", [True, False])
def test_a_terminal_is_asked_and_its_answer_holds(
    hub: ModelHub, monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    questions: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(type(err), "is_terminal", True)
    monkeypatch.setattr("typer.confirm", lambda text, err: questions.append(text) or answer)
    if answer:
        ensure_models([NAME], yes=False)
    else:
        with pytest.raises(GymError, match="not downloaded"):
            ensure_models([NAME], yes=False)
    assert questions == ["Download it?"]
    assert missing_model(NAME) is not answer


def test_a_dataset_is_offered_with_bytes_and_licence_and_needs_consent(hub: ModelHub, rows: Repo) -> None:
    source = DataConfig(hub=ROWS)
    with pytest.raises(GymError) as raised:
        ensure_datasets([source], yes=False)
    assert raised.value.code is ErrorCode.NOT_FOUND
    assert "at most" in raised.value.message
    assert "licence: mit" in raised.value.message
    assert "--yes" in raised.value.hint
    ensure_datasets([source, source], yes=True)


def test_a_subset_of_a_dataset_counts_its_own_folder(hub: ModelHub, rows: Repo) -> None:
    assert offer_dataset(ROWS, "main").total_bytes == len(rows.files["main/train.jsonl"])
    assert offer_dataset(ROWS).total_bytes == sum(map(len, rows.files.values()))


def test_a_cached_dataset_needs_no_consent(hub: ModelHub, rows: Repo, tmp_path: Path) -> None:
    store = Path(constants.HF_HUB_CACHE) / "datasets--acme--rows"
    (store / "snapshots" / rows.commit).mkdir(parents=True)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(rows.commit)
    hub.requests.clear()
    ensure_dataset(ROWS, consent=lambda offer: False)
    assert hub.requests == []


def test_an_unknown_dataset_is_refused_with_near_names(hub: ModelHub, rows: Repo) -> None:
    with pytest.raises(GymError) as raised:
        ensure_dataset("acme/rowz", consent=lambda offer: True)
    assert raised.value.code is ErrorCode.NOT_FOUND
    assert ROWS in raised.value.hint


def test_every_model_that_a_config_names_is_ensured() -> None:
    config = TrainingConfig.model_validate(
        {
            "algorithm": "ppo",
            "model": "acme/policy",
            "adapter": "acme/lora",
            "ppo": {"critic": "acme/critic"},
            "graders": [{"grader": "reward_model", "model": "acme/reward"}],
            "data": [{"tasks": ["copy"], "num_examples": 4}],
            "output_dir": "run",
        }
    )
    assert models_of(config) == ["acme/policy", "acme/lora", "acme/critic", "acme/reward"]
