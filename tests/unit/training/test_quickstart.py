"""The quickstart prints commands that mean the same, and refuses what it cannot do before it starts anything."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gym_fed import quickstart
from gym_fed.cli.main import app
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.reading import load_rows
from gym_fed.training import trainer


class Stopped(Exception):
    """A run that was to begin."""


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[TrainingConfig]:
    """Configs of the trainings that were to begin; none does."""
    found: list[TrainingConfig] = []

    class Recorder:
        def __init__(self, config: TrainingConfig, **_: object) -> None:
            found.append(config)

        def train(self, **_: object) -> None:
            raise Stopped

    monkeypatch.setattr(trainer, "Trainer", Recorder)
    return found


def test_the_printed_command_trains_the_same(
    configs: list[TrainingConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        quickstart.train_tiny_model(tmp_path / "my model", "dash", max_steps=3)
    printed = shlex.split(capsys.readouterr().err)
    assert printed[:3] == ["$", "gym", "train"]
    result = CliRunner().invoke(app, printed[2:])
    assert isinstance(result.exception, Stopped)
    assert configs[0] == configs[1]


@pytest.mark.parametrize(("contributors", "rounds"), [(0, 1), (9, 1), (1, 0)])
def test_a_federation_of_no_size_is_refused(contributors: int, rounds: int, tmp_path: Path) -> None:
    with pytest.raises(GymError) as refused:
        quickstart.federate(contributors, rounds, tmp_path / "new")
    assert refused.value.code is ErrorCode.USAGE
    assert not (tmp_path / "new").exists()


def test_a_federation_in_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GymError) as refused:
        quickstart.federate(1, 1, tmp_path)
    assert refused.value.code is ErrorCode.FILE_EXISTS


def test_commands_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "BIN", tmp_path / "bin")
    for call in (lambda: quickstart.federate(1, 1, tmp_path / "new"), serve):
        with pytest.raises(GymError) as refused:
            call()
        assert refused.value.code is ErrorCode.MISSING_DEPENDENCY
        assert str(tmp_path / "bin" / "gym") in refused.value.message
        assert "docs/install.md" in refused.value.hint


def serve() -> None:
    quickstart.VariantServer([quickstart.BIN / "gym", "api"], "gym-nano:ada")


def test_a_server_that_does_not_start_is_reported() -> None:
    with pytest.raises(GymError) as refused:
        quickstart.VariantServer(["/bin/true"], "gym-nano:ada")
    assert refused.value.code is ErrorCode.UNAVAILABLE


def test_the_printed_commands_write_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> float:
        raise Stopped

    monkeypatch.setattr(quickstart, "run_federation", stop)
    with pytest.raises(Stopped):
        quickstart.federate(2, 1, tmp_path / "federation")
    printed = [shlex.split(line)[1:] for line in capsys.readouterr().err.splitlines()]
    assert [words[:2] for words in printed] == [
        ["gym-server", "init"],
        *[["gym", "data"]] * 3,
        ["gym-server", "run"],
    ]
    written = [words for words in printed if words[1] == "data"]
    assert {Path(words[-1]).name for words in written} == {"ada.jsonl", "ben.jsonl", "heldout.jsonl"}
    for *words, file in written:
        again = tmp_path / "again.jsonl"
        done = CliRunner().invoke(app, [*words[1:], str(again), "--overwrite"])
        assert done.exit_code == 0, done.output
        assert load_rows(again) == load_rows(file)
