"""`Experiment`: one API, every tracker hears it, nothing is duplicated on resume, and nothing leaves the machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from gym_fed import Experiment
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.tracking.trackers.base import RunInfo
from gym_fed.tracking.trackers.wandb import WandB


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def log_and_resume(folder: Path, tracker: str) -> None:
    """Three steps; a resume after the first that repeats the second, differently."""
    result = folder.parent / "result.txt"
    result.write_text("weights")
    with Experiment(folder, [tracker], name="mine", tags=["a tag"]) as experiment:
        experiment.log_config({"learning_rate": 0.1, "lora": {"r": 4}})
        for step in (1, 2, 3):
            experiment.log_metrics({"loss": 1.0 / step, "rewards/exact": 0.5}, step)
        experiment.log_artifacts([result])
    with Experiment(folder, [tracker], name="mine", from_step=1) as experiment:
        experiment.log_config({"learning_rate": 0.1, "lora": {"r": 4}})
        experiment.log_metrics({"loss": 0.5, "rewards/exact": 7.0}, 2)


def test_figures_are_lines_of_json_and_what_depends_on_the_day_lies_apart(tmp_path: Path) -> None:
    with Experiment(tmp_path / "run") as experiment:
        experiment.log_metrics({"loss": 2.0, "kl": float("nan"), "performance/seconds": 3.0}, 5)
    assert lines(tmp_path / "run/metrics.jsonl") == [{"step": 5, "loss": 2.0}]
    assert lines(tmp_path / "run/performance.jsonl") == [{"step": 5, "seconds": 3.0}]
    with pytest.raises(GymError, match="closed"):
        experiment.log_metrics({"loss": 1.0}, 6)


def test_the_config_and_the_environment_of_an_experiment_are_in_its_folder(tmp_path: Path) -> None:
    with Experiment(tmp_path / "run") as experiment:
        experiment.log_config({"learning_rate": 0.1, "lora": {"r": 4}, "output": Path("somewhere")})
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written == {"learning_rate": 0.1, "lora": {"r": 4}, "output": "somewhere"}
    record = json.loads((tmp_path / "run/environment.json").read_text())
    assert record["environment"]["packages"]["torch"] == torch.__version__


def test_artifacts_from_elsewhere_are_copied_with_their_digests_and_a_changed_one_beside_the_first(
    tmp_path: Path,
) -> None:
    folder, file = tmp_path / "tokenizer", tmp_path / "model.txt"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/words.txt").write_text("words")
    with Experiment(tmp_path / "run") as experiment:
        for text in ("first", "first", "second"):
            file.write_text(text)
            experiment.log_artifacts([file, folder])
        (tmp_path / "run/own.txt").write_text("own")
        experiment.log_artifacts([tmp_path / "run/own.txt"])
    logged = lines(tmp_path / "run/artifacts.jsonl")
    first, words, second, own = logged
    assert [first["copy"], words["copy"]] == ["artifacts/model.txt", "artifacts/tokenizer/sub/words.txt"]
    for line, text in ((first, "first"), (words, "words"), (second, "second")):
        assert (tmp_path / "run" / line["copy"]).read_text() == text
        assert line["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert own == {"path": str(tmp_path / "run/own.txt")}


def test_scalars_of_numpy_and_torch_are_figures_and_nothing_else_is(tmp_path: Path) -> None:
    scalars = {"a": np.float32(0.5), "b": torch.tensor(2.0, requires_grad=True), "c": np.int64(3), "d": 4}
    with Experiment(tmp_path / "run") as experiment:
        experiment.log_metrics(scalars, 1)
        for wrong in (None, "0.5", torch.ones(2), np.ones(2)):
            with pytest.raises(GymError, match="'loss' is") as caught:
                experiment.log_metrics({"fine": 1.0, "loss": wrong}, 2)
            assert caught.value.code is ErrorCode.USAGE
    assert lines(tmp_path / "run/metrics.jsonl") == [{"step": 1, "a": 0.5, "b": 2.0, "c": 3, "d": 4}]


def test_lines_are_never_appended_to_one_that_a_kill_tore(tmp_path: Path) -> None:
    for _ in range(2):
        with Experiment(tmp_path / "run") as experiment:
            experiment.log_metrics({"loss": 1.0}, 1)
            experiment.log_artifacts([tmp_path / "run"])
        for name in ("metrics.jsonl", "artifacts.jsonl"):
            with (tmp_path / "run" / name).open("a") as file:
                file.write('{"torn')
    with Experiment(tmp_path / "run") as experiment:
        experiment.log_metrics({"loss": 1.0}, 1)
        experiment.log_artifacts([tmp_path / "run/metrics.jsonl"])
    assert lines(tmp_path / "run/metrics.jsonl") == [{"step": 1, "loss": 1.0}] * 3
    assert [line["path"] for line in lines(tmp_path / "run/artifacts.jsonl")] == [
        str(tmp_path / "run"),
        str(tmp_path / "run/metrics.jsonl"),
    ]


def test_a_resume_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    log_and_resume(tmp_path / "run", "jsonl")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with Experiment(tmp_path / "run", from_step=2) as experiment:
        experiment.log_metrics({"loss": 0.25}, 3)
    found = lines(tmp_path / "run/metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in found] == [(1, 1.0), (2, 0.5), (3, 0.25)]


def test_tensorboard_reads_one_curve_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read in the order of the process's count of them, by its letters: 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    log_and_resume(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("rewards/exact")]
    assert points == [(1, 0.5), (2, 7.0)]
    assert "config" in events.Tags()["tensors"]


def test_mlflow_keeps_everything_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    log_and_resume(tmp_path / "run", "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("gym-fed")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1, "the resumed run is the same run"
    run = runs[0]
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"learning_rate": "0.1", "lora.r": "4"}
    assert "a tag" in run.data.tags
    loss = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((p.step, p.value) for p in loss) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["result.txt"]


def test_wandb_is_offline_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")  # the config decides
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))
    log_and_resume(tmp_path / "run", "wandb")
    runs = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert runs
    written = b"".join(file.read_bytes() for run in runs for file in run.glob("*.wandb"))
    assert b"rewards/exact" in written
    assert b"learning_rate" in written


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_wandb_sends_no_key_to_the_host_that_a_file_of_the_working_folder_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    monkeypatch.chdir(tmp_path)
    run = RunInfo(folder=tmp_path / "run", project="p", name="r", online=True)
    with pytest.raises(GymError, match=f"{folder}/settings, which may send its API key to another host"):
        WandB().open(run)
    assert not run.folder.exists()


def test_a_tracker_that_is_missing_or_unknown_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "trackio" else there(n, *a))
    with pytest.raises(GymError, match="trackio is not installed") as caught:
        Experiment(tmp_path / "run", ["trackio"])
    assert caught.value.code is ErrorCode.MISSING_DEPENDENCY
    assert "gym-fed[track]" in caught.value.hint
    with pytest.raises(GymError, match="unknown tracker 'aim'"):
        Experiment(tmp_path / "run", ["aim"])
    with pytest.raises(GymError, match="neither offline nor online"):
        Experiment(tmp_path / "run", mode="sometimes")
    with pytest.raises(GymError, match="does not exist"):
        Experiment(tmp_path / "run").log_artifacts([tmp_path / "nothing"])
    assert not (tmp_path / "run").exists()


def test_the_trackers_of_every_run_are_added() -> None:
    from gym_fed.config.train.training import TrainingConfig

    assert TrainingConfig(tracking=["wandb"]).tracking == ["jsonl", "tensorboard", "wandb"]
