"""The batch size that is found: the largest that fits, the same global batch, and the same size after a resume."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data import generate
from gym_fed.training.rows.batch_size import check_batch_size, largest_on_cpu
from gym_fed.training.trainer import Trainer

ROWS = generate("copy", 40)


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
        "auto_batch_size": {"memory_gib": 8.0},
    }
    return TrainingConfig(**{**values, **changes})


def train(tiny_base: Path, settings: TrainingConfig, **hooks: Any) -> Any:
    loaded = load_model(str(tiny_base))
    return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(ROWS)


def sizes(folder: Path) -> tuple[int, int]:
    found = yaml.safe_load((folder / "config.yaml").read_text())
    return found["per_device_train_batch_size"], found["gradient_accumulation_steps"]


def test_a_size_is_not_tried_when_those_before_it_say_that_it_will_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system's figure is scripted: it also moves by what the system itself takes back from a large process."""
    tried: list[int] = []
    held = [0]

    def process() -> Any:
        return SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=(500 << 20) + held[0]))

    def step(size: int) -> None:
        tried.append(size)
        held[0] = size * (20 << 20)  # 20 MiB a row, while it runs
        time.sleep(0.05)
        held[0] = 0

    monkeypatch.setattr(psutil, "Process", process)
    assert largest_on_cpu(step, [1, 2, 4, 8, 16], 130 << 20) == 4
    assert tried == [1, 2, 4]
    assert largest_on_cpu(step, [8], 10 << 20) is None


def test_the_whole_batch_is_taken_where_memory_allows_and_training_is_as_if_it_had_been_written(
    tiny_base: Path, tmp_path: Path
) -> None:
    found = train(tiny_base, config(tmp_path / "auto"))
    assert sizes(tmp_path / "auto") == (16, 1)
    by_hand = config(
        tmp_path / "hand",
        auto_batch_size=None,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
    )
    assert train(tiny_base, by_hand).losses == found.losses


def test_a_resume_uses_the_size_that_was_found(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.training.rows.batch_size.largest_on_cpu", lambda *given: 4)
    seen: list[int] = []
    with pytest.raises(GymError, match="stopped at step 2"):
        train(
            tiny_base,
            config(tmp_path / "run"),
            on_step=lambda step, total, loss: seen.append(step),
            should_stop=lambda: len(seen) == 2,
        )
    assert sizes(tmp_path / "run") == (4, 4)
    monkeypatch.undo()  # asked again, it would find 16
    result = train(tiny_base, config(tmp_path / "run"))
    assert (sizes(tmp_path / "run"), result.steps) == ((4, 4), 3)
    assert json.loads((tmp_path / "run/batch_size.json").read_text())["gradient_accumulation_steps"] == 4
    with pytest.raises(GymError, match="16 rows per step, but the config has 32"):
        train(tiny_base, config(tmp_path / "run", gradient_accumulation_steps=4))


def test_what_cannot_be_honoured_is_refused(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="not even one row fits") as caught:
        train(tiny_base, config(tmp_path / "run", auto_batch_size={"memory_gib": 1e-6}))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    with pytest.raises(GymError, match="whole groups of answers"):
        check_batch_size(config(tmp_path, algorithm="grpo", graders=[{"grader": "exact"}]))
