"""`gym runs` reads run folders, and only reads them."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from gym_fed.cli.runs import app, sparkline
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.folder import FolderLock


def a_run(folder: Path, losses: list[float], *, finished: bool = True, **settings: Any) -> Path:
    folder.mkdir(parents=True)
    config = {"algorithm": "sft", "model": "gym-nano", "learning_rate": 0.001, "lora": {"r": 4}, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "output_dir": str(folder)}))
    (folder / "run.json").write_text("{}")
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    lines += [{"step": len(losses), "eval_loss": loss + 1} for loss in losses[-1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        result = {"steps": len(losses), "final_loss": losses[-1]}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def gym(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_list_distinguishes_finished_running_and_unfinished(tmp_path: Path) -> None:
    a_run(tmp_path / "a", [3.0, 2.0])
    a_run(tmp_path / "deep/b", [3.0], finished=False)
    old = a_run(tmp_path / "c", [5.0], finished=False)
    for file in old.iterdir():
        os.utime(file, (time.time() - 9999, time.time() - 9999))
    found = json.loads(gym("list", tmp_path, "--json"))
    assert {Path(run["folder"]).name: run["status"] for run in found} == {
        "a": "finished",
        "b": "running?",
        "c": "unfinished",
    }
    assert found[-1]["folder"] == str(old), "the newest comes first"
    table = gym("list", tmp_path)
    assert str(tmp_path / "deep/b") in table
    with pytest.raises(GymError, match="no folder at"):
        gym("list", tmp_path / "nowhere")


def test_a_run_is_running_while_a_process_holds_its_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", [], finished=False)
    (run / "metrics.jsonl").unlink()
    (run / "checkpoints/checkpoint-7").mkdir(parents=True)
    lock = FolderLock(run)
    states = [json.loads(gym("show", run, "--json"))]
    lock.release()
    states.append(json.loads(gym("show", run, "--json")))
    assert [(run["status"], run["steps"]) for run in states] == [("running", 7), ("unfinished", 7)]


def test_one_folder_that_cannot_be_read_hides_no_others(tmp_path: Path) -> None:
    a_run(tmp_path / "a", [3.0])
    torn = a_run(tmp_path / "torn", [3.0])
    (torn / "config.yaml").write_text("model: [")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "run.json").write_text("{}")
    status = {Path(run["folder"]).name: run for run in json.loads(gym("list", tmp_path, "--json"))}
    assert {name: run["status"] for name, run in status.items()} == {
        "a": "finished",
        "torn": "unreadable",
        "foreign": "unreadable",
    }
    assert "not valid YAML" in status["torn"]["why"]
    assert gym("list", tmp_path).count("unreadable") == 2


def test_figures_without_a_step_and_of_speed_are_shown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", [3.0], finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"accuracy": 0.5}\n')
    (run / "performance.jsonl").write_text('{"step": 1, "tokens_per_second": 70.0}\n')
    assert json.loads(gym("show", run, "--json"))["figures"]["accuracy"] == 0.5
    assert "70" in gym("plot", run, "--metric", "tokens_per_second")


def test_show_gives_figures_settings_and_where_it_ran(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", [3.0, 2.0])
    where = {"cpu": "a CPU", "gpus": [], "packages": {"torch": "9"}, "git": {"commit": "abc"}}
    (run / "environment.json").write_text(json.dumps({"environment": where, "resumed_with": []}))
    text = gym("show", run)
    for expected in ("finished", "eval_loss", "torch 9", "abc", "lora.r", "█"):
        assert expected in text
    found = json.loads(gym("show", run, "--json"))
    assert found["figures"] == {"loss": 2.0, "eval_loss": 3.0, "final_loss": 2.0}
    assert found["config"]["lora"] == {"r": 4}
    with pytest.raises(GymError, match="contains no run") as caught:
        gym("show", tmp_path)
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    (run / "metrics.jsonl").write_text("no json\n")
    with pytest.raises(GymError, match="not JSON"):
        gym("show", run)


def test_compare_shows_what_differs_and_nothing_else(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", [3.0, 2.0])
    b = a_run(tmp_path / "b", [3.0, 1.0], lora={"r": 8}, seed=1)
    found = json.loads(gym("compare", a, b, "--json"))
    assert found["settings"] == {"lora.r": [4, 8], "seed": [None, 1]}
    assert found["figures"]["loss"] == [2.0, 1.0]
    table = gym("compare", a, b)
    assert "lora.r" in table
    assert "learning_rate" not in table
    with pytest.raises(GymError, match="needs at least two runs"):
        gym("compare", a)


def test_plot_draws_a_picture_or_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = a_run(tmp_path / "a", [3.0, 2.0, 1.0]), a_run(tmp_path / "b", [3.0, 2.5, 2.0])
    assert "█▅▁" in gym("plot", a, b)
    series = json.loads(gym("plot", a, "--metric", "eval_loss", "--json"))["series"]
    assert series == {"eval_loss": {str(a): [[3, 2.0]]}}
    with pytest.raises(GymError, match="no run has logged 'reward'") as caught:
        gym("plot", a, "--metric", "reward")
    assert "loss" in caught.value.hint
    pytest.importorskip("matplotlib")
    gym("plot", a, b, "--metric", "loss", "--metric", "eval_loss", "-o", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(GymError, match=r"p\.xyz"):
        gym("plot", a, "-o", tmp_path / "p.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(GymError, match="matplotlib") as caught:
        gym("plot", a, "-o", tmp_path / "q.png")
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY


def test_bars_are_as_many_as_fit() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 60
