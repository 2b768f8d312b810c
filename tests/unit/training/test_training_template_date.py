"""A chat template that prints the day: the run goes on the day after, with the day on which it began."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import chat_template_utils

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.training.run import folder as run_folder
from gym_fed.training.trainer import Trainer

ROWS = generate("double", 24)
PRINTS_THE_DAY = "{{ 'Today Date: ' + strftime_now('%d %b %Y') }}"


def at(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return moment

    for module in (chat_template_utils, run_folder):
        monkeypatch.setattr(module, "datetime", Clock)


def train(base: Path, folder: Path, rows: list[dict[str, Any]] = ROWS, **hooks: Any) -> Any:
    loaded = load_model(str(base))
    loaded.tokenizer.chat_template = PRINTS_THE_DAY + loaded.tokenizer.chat_template
    settings = TrainingConfig(
        output_dir=folder,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=96,
        device="cpu",
        num_threads=1,
        assistant_only_loss=False,
        save_final=False,
    )
    return Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer, **hooks).train(rows)


def test_a_run_whose_template_prints_the_day_goes_on_the_day_after(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = datetime(2026, 3, 1, 23, 50)
    at(monkeypatch, today)
    whole = train(tiny_base, tmp_path / "whole")
    seen: list[int] = []
    stop: dict[str, Any] = {
        "on_step": lambda step, total, loss: seen.append(step),
        "should_stop": lambda: len(seen) == 2,
    }
    with pytest.raises(GymError, match="stopped at step 2 of 4"):
        train(tiny_base, tmp_path / "part", **stop)
    at(monkeypatch, today + timedelta(days=1))
    resumed = train(tiny_base, tmp_path / "part")
    assert resumed.losses == whole.losses
    later = train(tiny_base, tmp_path / "later")
    assert later.losses != whole.losses, "the day is not among the tokens"
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert chat_template_utils.datetime.now() == today + timedelta(days=1), "the clock is as it was"


def test_other_rows_or_another_template_are_another_run(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(GymError, match="stopped at step 1"):
        train(tiny_base, tmp_path / "run", should_stop=lambda: True)
    with pytest.raises(GymError, match="holds an unfinished run on different data"):
        train(tiny_base, tmp_path / "run", [*ROWS[:-1], ROWS[0]])
    loaded = load_model(str(tiny_base))
    settings = TrainingConfig.model_validate(
        {**_saved(tmp_path / "run"), "output_dir": tmp_path / "run", "data": []}
    )
    with pytest.raises(GymError, match="holds an unfinished run on different data"):
        Trainer(settings, model=loaded.model, tokenizer=loaded.tokenizer).train(ROWS)


def _saved(folder: Path) -> Any:
    import yaml

    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
