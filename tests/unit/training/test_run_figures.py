"""What a run logs, evaluates and records; early stopping; and that all of it survives an interruption."""

from __future__ import annotations

import json
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gym_fed.base.models import load_model
from gym_fed.cli.train.train import _next as advice_after
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.library_env import settle
from gym_fed.data import generate
from gym_fed.training.run.hooks import RunHooks, StepReport, gpu_utilization
from gym_fed.training.run.reproducibility import RunWarning
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 40)
HELD_OUT = generate("copy", 4, seed=3)


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "logging_steps": 2,
        "save_final": False,
    }
    return TrainingConfig(**{**values, **changes})


def train(tiny_base: Path, settings: TrainingConfig, held_out: Any = None, **hooks: Any) -> Any:
    loaded = load_model(str(tiny_base))
    return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(ROWS, held_out)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_everything_numeric_is_tracked_and_reported(tiny_base: Path, tmp_path: Path) -> None:
    heard: list[StepReport] = []
    train(tiny_base, config(tmp_path / "run", eval_steps=4), HELD_OUT, on_report=heard.append)
    found = lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in found if "loss" in line] == [1, 2, 4, 6, 8]
    assert [line["step"] for line in found if "eval_loss" in line] == [4, 8]
    assert all("mean_token_accuracy" in line for line in found if "loss" in line)
    assert not any("runtime" in key or "per_second" in key for line in found for key in line)
    performance = lines(tmp_path / "run/performance.jsonl")
    assert all(
        line["tokens_per_second"] > 0 and line["peak_ram_bytes"] > 1e6
        for line in performance
        if "seconds" in line
    )
    assert list((tmp_path / "run/tensorboard").iterdir())
    steps = [report for report in heard if report.evaluation is None]
    assert [report.step for report in steps] == list(range(1, 9))
    assert steps[-1].memory_bytes > 1e6
    assert steps[-1].num_tokens == found[-2]["num_tokens"]
    evaluations = [report for report in heard if report.evaluation is not None]
    assert [report.evaluation["eval_loss"] for report in evaluations] == [
        line["eval_loss"] for line in found if "eval_loss" in line
    ]


def test_the_tokens_of_a_step_are_those_of_all_its_batches(tiny_base: Path, tmp_path: Path) -> None:
    """A step of 8 rows in 1 batch or in 4 has the same number of tokens, and every step adds its own."""

    def counted(
        name: str, batch: int, accumulation: int, privacy: dict[str, float] | None = None
    ) -> list[int]:
        heard: list[StepReport] = []
        changes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        settings = config(tmp_path / name, max_steps=3, privacy=privacy, max_grad_norm=1.0, **changes)
        train(tiny_base, settings, on_report=heard.append)
        return [report.num_tokens for report in heard]

    whole = counted("whole", 8, 1)
    assert 0 < whole[0] < whole[1] < whole[2]
    assert counted("parts", 2, 4) == whole
    private = counted("private", 2, 4, {"noise_multiplier": 1.0, "target_delta": 1e-5})
    assert 0 < private[0] < private[1] < private[2]
    assert whole[2] / 2 < private[2] < whole[2] * 2, "of rows that were drawn, 24 on average"


def test_rewards_are_averaged_over_the_lines_steps_and_reported(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from gym_fed.tracking.experiment import Experiment

    heard: list[StepReport] = []
    hooks = RunHooks(
        lambda step: Experiment(tmp_path, from_step=step), lambda total: 3, on_report=heard.append
    )
    state = SimpleNamespace(log_history=[], global_step=0, max_steps=3)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    hooks.on_train_begin(None, state, control)
    for step, reward in ((1, 0.2), (2, 0.0), (3, 1.0)):
        logs = {"loss": 0.0, "reward": reward, "rewards/exact/mean": reward, "kl": 0.5, "step_time": 9.0}
        state.global_step = step
        state.log_history.append({**logs, "step": step})
        hooks.on_log(None, state, control, logs)
    hooks.close()
    first, line = lines(tmp_path / "metrics.jsonl")
    assert (first["step"], first["reward"], line["step"]) == (1, 0.2, 3)
    assert (line["reward"], line["rewards/exact/mean"], line["kl"]) == (0.5, 0.5, 0.5)
    assert "step_time" not in line
    assert [report.reward for report in heard] == [0.2, 0.0, 1.0]


@pytest.mark.parametrize("eval_steps", [0, 3])
def test_a_stopped_run_with_evaluations_resumes_to_the_same_bytes(
    tiny_base: Path, tmp_path: Path, eval_steps: int
) -> None:
    changes = {"eval_steps": eval_steps, "max_steps": 14}
    whole = train(tiny_base, config(tmp_path / "whole", **changes), HELD_OUT)
    seen: list[int] = []
    with pytest.raises(GymError, match="stopped at step 5"):
        train(
            tiny_base,
            config(tmp_path / "part", **changes),
            HELD_OUT,
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 5,
        )
    resumed = train(tiny_base, config(tmp_path / "part", **changes), HELD_OUT)
    assert resumed.losses == whole.losses
    assert (tmp_path / "part/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()


def test_early_stopping_ends_with_the_best_weights_also_after_a_stop(tiny_base: Path, tmp_path: Path) -> None:
    # Whatever gets better stays within min_delta, so that the first evaluation is the best.
    stopping = {"patience": 2, "min_delta": 100.0}
    changes = {"eval_steps": 2, "max_steps": 20, "early_stopping": stopping}
    first: dict[int, dict[str, torch.Tensor]] = {}
    loaded = load_model(str(tiny_base))

    def keep(report: StepReport) -> None:
        if report.evaluation is not None:
            first[report.step] = {k: v.clone() for k, v in loaded.model.state_dict().items()}

    trainer = Trainer(
        config(tmp_path / "run", **changes), model=loaded.model, tokenizer=loaded.tokenizer, on_report=keep
    )
    result = trainer.train(ROWS, HELD_OUT)
    assert (result.steps, result.best_step) == (6, 2)
    weights = result.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in first[2].items())
    assert not all(torch.equal(weights[name], value) for name, value in first[6].items())

    seen: list[int] = []
    part = config(tmp_path / "part", **changes)
    with pytest.raises(GymError, match="stopped at step 5"):
        train(
            tiny_base,
            part,
            HELD_OUT,
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 5,
        )
    resumed = train(tiny_base, part, HELD_OUT)
    assert (resumed.steps, resumed.best_step) == (6, 2)
    assert all(torch.equal(value, weights[name]) for name, value in resumed.model.state_dict().items())


def test_early_stopping_needs_rows_and_a_metric_that_is_logged(tiny_base: Path, tmp_path: Path) -> None:
    for changes in ({"early_stopping": {}}, {"eval_steps": 5}):
        with pytest.raises(GymError, match="no held-out rows") as caught:
            train(tiny_base, config(tmp_path / "run", **changes))
        assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert not (tmp_path / "run").exists()
    wrong = config(tmp_path / "wrong", eval_steps=1, early_stopping={"metric": "eval_bleu"})
    with pytest.raises(GymError, match="not report 'eval_bleu'") as caught:
        train(tiny_base, wrong, HELD_OUT)
    assert "eval_loss" in caught.value.hint


def test_the_environment_is_recorded_and_a_change_is_reported_on_resume(
    tiny_base: Path, tmp_path: Path
) -> None:
    settings = config(tmp_path / "run", save_steps=4)
    train(tiny_base, settings)
    file = tmp_path / "run/environment.json"
    record = json.loads(file.read_text())
    where = record["environment"]
    assert where["packages"]["torch"] == torch.__version__.partition("+")[0] or where["packages"]["torch"]
    assert (where["seed"], where["threads"]) == (0, 1)
    assert where["data_sha256"] == json.loads((tmp_path / "run/run.json").read_text())["data_sha256"]
    assert str(Path.home()) not in file.read_text()
    where["packages"]["torch"] = "1.0"
    file.write_text(json.dumps(record))
    with pytest.warns(RunWarning, match=r"resumed in a different environment.*torch was 1\.0 and is"):
        train(tiny_base, settings)
    assert "packages" in json.loads(file.read_text())["resumed_with"][0]
    silent = config(tmp_path / "silent", reproducibility={"record": False})
    train(tiny_base, silent)
    assert not (tmp_path / "silent/environment.json").exists()


def test_deterministic_refuses_or_reports_operations_that_are_not(tiny_base: Path, tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    def look(step: int, total: int, loss: float) -> None:
        seen.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
        )

    for number, mode in enumerate((True, "warn", False)):
        settings = config(tmp_path / str(number), reproducibility={"deterministic": mode}, max_steps=1)
        with warnings.catch_warnings():
            train(tiny_base, settings, on_step=look)
    assert seen == [(True, False), (True, True), (False, False)]
    assert not torch.are_deterministic_algorithms_enabled(), "the process is left as it was"


def test_libraries_are_silent_about_their_own_old_names_and_long_rows(
    tiny_base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(str(tiny_base))
    loaded.tokenizer.model_max_length = 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settle()
        assert loaded.model.is_gradient_checkpointing is False
        loaded.tokenizer("a row of more than eight tokens")
    assert capfd.readouterr().err == ""


def test_the_next_command_for_a_trained_model_is_printed(tmp_path: Path) -> None:
    assert "gym chat runs/a" in advice_after(config(tmp_path), Path("runs/a"))
    judge = advice_after(config(tmp_path, algorithm="reward_model"), Path("runs/b"))
    assert "{grader: reward_model, model: runs/b}" in judge
    assert "chat" not in judge


@pytest.mark.parametrize(
    ("given", "total", "interval"),
    [(None, 7, 1), (None, 199, 1), (None, 400, 4), (None, 100_000, 10), (25, 7, 25)],
)
def test_metrics_come_at_a_hundredth_of_the_run_unless_the_config_says_otherwise(
    given: int | None, total: int, interval: int
) -> None:
    assert TrainingConfig(model="m", logging_steps=given).logging_interval(total) == interval


class NVMLError(Exception):
    """That of ``pynvml``."""


def test_use_of_the_gpu_is_a_figure_where_the_library_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_utilization() is None  # no GPU here
    library = ModuleType("pynvml")
    library.__spec__ = ModuleSpec("pynvml", None)
    library.NVMLError = NVMLError  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_utilization() is None  # not installed
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr("torch.cuda.utilization", lambda: 87)
    assert gpu_utilization() == 87.0

    def of_a_part() -> int:
        raise NVMLError("not supported")

    monkeypatch.setattr("torch.cuda.utilization", of_a_part)
    assert gpu_utilization() is None
