"""The list of recent runs: newest first, bounded, and no obstacle to training."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_fed.cli.train.train import _remember
from gym_fed.training.run import recent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return folder


def test_the_newest_run_comes_first_once_and_old_ones_drop_out(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "MAX_FOLDERS", 2)
    first, second, third = (make_run(tmp_path / name) for name in ("a", "b", "c"))
    for folder in (first, second, first):
        recent.remember_run(folder)
    assert recent.recent_runs() == [first, second]
    recent.remember_run(third)
    assert recent.recent_runs() == [third, first]
    (third / "run.json").unlink()
    assert recent.recent_runs() == [first]


def test_a_home_that_cannot_be_written_is_said_and_stops_no_run(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.write_text("a file")
    _remember(tmp_path)
    assert "gym webui will not list this run" in " ".join(capsys.readouterr().err.split())
    assert recent.recent_runs() == []
