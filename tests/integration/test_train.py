"""`gym train` and `gym chat` as real processes: Ctrl-C, resuming to the bit, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.training.trainer import Trainer
from tests.support.in_process import run_here
from tests.support.quick import quick
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess, run

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}


def gym(*words: object, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run(["gym", *map(str, words)], stdin=stdin, cwd=cwd, env=ENVIRONMENT)


def here(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_here(["gym", *map(str, words)], cwd=cwd, env=ENVIRONMENT)


def recipe(folder: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "model": "gym-nano",
        "data": [{"tasks": ["double"], "num_examples": 100}],
        "output_dir": "run",
        "max_steps": 24,
        "per_device_train_batch_size": 4,
        "device": "cpu",
        "num_threads": 1,
        "logging_steps": 1,
    }
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}))
    return file


@pytest.fixture(scope="module", params=quick([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def interrupted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int, str]:
    """A folder in which training got Ctrl-C or SIGTERM in the middle; its exit status and what it said."""
    folder = tmp_path_factory.mktemp("interrupted")
    recipe(folder)
    process = WarmProcess(
        ["gym", "train", "train.yaml", "--no-check"], cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("step 5/") and said.count("step 5/") == 1:
            process.send_signal(request.param)
    return folder, process.wait(SECONDS), said


def test_a_signal_leaves_a_checkpoint_the_code_128_plus_its_number_and_the_way_to_resume(
    interrupted: tuple[Path, int, str], request: pytest.FixtureRequest
) -> None:
    folder, status, said = interrupted
    number = request.node.callspec.params["interrupted"]
    assert status == 128 + number
    assert f"{'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'} again stops at once" in said
    assert "of 24; a checkpoint is in run/checkpoints" in said
    assert "resume with: gym train run/config.yaml" in said
    assert "step 24/24" not in said
    assert not (folder / "run/result.json").exists()


def test_the_resumed_run_equals_one_that_was_never_stopped(
    interrupted: tuple[Path, int, str], tmp_path: Path
) -> None:
    folder = interrupted[0]
    half = gym("chat", "run", "--prompt", "hi", cwd=folder)
    assert half.returncode == 30, half.stderr
    assert "the run is not finished" in half.stderr

    resumed = gym("train", "run/config.yaml", "--no-check", "--json", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "step 5/24" not in resumed.stderr
    summary = json.loads(resumed.stdout)
    assert (summary["steps"], summary["output_dir"]) == (24, "run")

    settings = load_config(folder / "train.yaml", TrainingConfig, [f"output_dir={tmp_path / 'whole'}"])
    whole = Trainer(settings).train()
    assert summary["final_loss"] == whole.final_loss
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (folder / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    again = gym("train", "train.yaml", cwd=folder)
    assert again.returncode == 12
    assert "holds a finished run" in again.stderr
    assert "--overwrite" in again.stderr


def test_a_lora_run_is_made_chatted_with_and_overwritten_only_with_the_flag(tmp_path: Path) -> None:
    recipe(tmp_path, finetuning="lora", max_steps=2)
    made = gym("train", "train.yaml", "--no-check", "--set", "lora.r=4", "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert load_config(tmp_path / "run/config.yaml", TrainingConfig).lora.r == 4
    adapter = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["r"]) == ("gym-nano", 4)
    said = gym("chat", "run", cwd=tmp_path, stdin="length: abc\n/reset\n/exit\nlength: a\n")
    assert (said.returncode, said.stdout) == (0, "3\n"), said.stderr
    refused = gym(
        "chat", "run", cwd=tmp_path, stdin="/nonsense\nlength: a\n"
    )  # a script ends where it is wrong
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "/nonsense is not a command" in refused.stderr
    again = ("train", "train.yaml", "--overwrite", "--no-check", "--set", "max_steps=1", "--json")
    replaced = gym(*again, cwd=tmp_path)
    assert json.loads(replaced.stdout)["steps"] == 1


def test_a_bad_value_a_bad_row_and_a_missing_model_end_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    recipe(tmp_path, data=[{"path": "bad.jsonl"}])
    row = here("train", "train.yaml", cwd=tmp_path)
    assert (row.returncode, "bad.jsonl:2: 'text' is int" in row.stderr) == (20, True)
    model = here(
        "train", "train.yaml", "--set", "model=nobody/nothing", "--set", "data.0.path=ok.jsonl", cwd=tmp_path
    )
    assert model.returncode == 11
    value = here("train", "train.yaml", "--set", "learning_rat=1", cwd=tmp_path)
    assert (value.returncode, "did you mean 'learning_rate'?" in value.stderr) == (10, True)
    assert not (tmp_path / "run").exists()


def test_generated_data_is_written_once_and_scored(tmp_path: Path) -> None:
    made = here(
        "data", "generate", "--task", "double", "--num", 30, "--split", "heldout", "d.jsonl", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    assert len((tmp_path / "d.jsonl").read_text().splitlines()) == 30
    again = here("data", "generate", "--task", "copy", "d.jsonl", cwd=tmp_path)
    assert (again.returncode, "--overwrite" in again.stderr) == (12, True)
    scored = here(
        "data",
        "score",
        "gym-nano",
        "--task",
        "double",
        "--task",
        "length",
        "--num",
        20,
        "--json",
        cwd=tmp_path,
    )
    figures = json.loads(scored.stdout)["exact_match"]
    assert figures["double"] <= 0.05
    assert figures["length"] >= 0.9
