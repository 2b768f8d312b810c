"""`gym batch` at its door: what its options change, and what it prints at its end; nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.cli import batch
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.batch_run import BatchReport


@pytest.fixture
def source(tmp_path: Path) -> Path:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "gym-nano", "prompt": "x"},
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path / "in.jsonl"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have been run; one request of ten fails."""
    called: list[tuple[Any, ...]] = []

    def run(settings: Any, given: Any, output: Any, seed: int) -> BatchReport:
        called.append((settings, seed))
        return BatchReport(10, 10, 1, 4, 60, 30, 2.0)

    monkeypatch.setattr(batch, "_run", run)
    return called


def test_options_reach_the_settings_over_those_of_the_file(source: Path, runs: list[tuple[Any, ...]]) -> None:
    folder = source.parent
    (folder / "serving.yaml").write_text("base: other\nport: 9\nengine: {max_concurrent: 3}\n")
    words = ["batch", str(source), str(folder / "out.jsonl"), "--config", str(folder / "serving.yaml")]
    CliRunner().invoke(
        app, [*words, "--base", "gym-nano", "--variants", "v", "--set", "engine.max_queued=1", "--seed", "4"]
    )
    settings, seed = runs[0]
    assert (settings.base, settings.variants, settings.port, seed) == ("gym-nano", Path("v"), 9, 4)
    assert batch._num_in_progress(settings.engine) == 3 + 1
    described = json.loads((folder / "out.jsonl.batch.json").read_text())
    assert (described["base"], described["seed"]) == ("gym-nano", 4)


def test_failures_give_an_exit_code_and_figures(source: Path, runs: list[tuple[Any, ...]]) -> None:
    done = CliRunner().invoke(app, ["batch", str(source), str(source.parent / "out.jsonl"), "--json"])
    assert done.exit_code == ErrorCode.DATA_INVALID.exit_code
    figures = json.loads(done.stdout)
    assert (figures["succeeded"], figures["failed"], figures["tokens_per_second"]) == (9, 1, 15.0)
    assert "1 of 10 requests failed" in done.stderr


def test_ctrl_c_says_how_far_it_came(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "_run", interrupt)
    done = CliRunner().invoke(app, ["batch", str(source), str(source.parent / "out.jsonl")])
    assert isinstance(done.exception, GymError)
    assert done.exception.code is ErrorCode.INTERRUPTED
    assert "answered 0 of 1 request" in done.exception.message


def test_a_request_for_an_unknown_model_leaves_no_output(source: Path) -> None:
    source.write_text(source.read_text().replace("gym-nano", "other"))
    words = ["batch", str(source), str(source.parent / "out.jsonl"), "--base", "gym-nano"]
    done = CliRunner().invoke(app, [*words, "--errors", str(source.parent / "errors.jsonl")])
    assert "nothing was run" in str(done.exception)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_one_file_is_not_two_things(source: Path, runs: list[tuple[Any, ...]]) -> None:
    before = source.read_bytes()
    out = source.parent / "out.jsonl"
    for words in ([source, source], [source, out, "--errors", out], [source, out, "--errors", source]):
        done = CliRunner().invoke(app, ["batch", *map(str, words)])
        assert isinstance(done.exception, GymError)
        assert "different files" in done.exception.message
    assert source.read_bytes() == before
    assert not runs


def test_progress_shows_failures_speed_and_the_time_that_is_left() -> None:
    assert batch._figures(BatchReport(10, 10, 1, 0, 10, 30, 2.0)) == "1 failed  15 tokens/s"
    assert batch._figures(BatchReport(10, 2, 1, 0, 10, 30, 20.0)) == "1 failed  2 tokens/s  1:20 left"
