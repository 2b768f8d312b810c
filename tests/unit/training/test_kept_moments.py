"""AdamW continues from the moments that an earlier run has kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import model_tensors
from gym_fed.delta.feedback import ErrorFeedback
from gym_fed.training.run.kept_moments import KeptMoments
from gym_fed.training.trainer import Trainer

LINEAGE = "base"


def moments_in(path: Path) -> dict[str, Tensor]:
    file = ErrorFeedback.load(path, LINEAGE)
    return {name: tensor for name in file.names() if (tensor := file.residual(name)) is not None}


def trained(
    model: object,
    tokenizer: object,
    folder: Path,
    steps: int,
    keeper: KeptMoments,
    on_step: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train on one row, so that every step has the same batch."""
    row = {"prompt": "who is it", "completion": "it is ann"}
    config = TrainingConfig(
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        output_dir=folder,
        save_steps=1,
    )
    trainer = Trainer(config, model=model, tokenizer=tokenizer, observer=keeper, on_step=on_step)
    trainer.train(dataset=[row])


def test_two_runs_with_kept_moments_end_with_the_weights_of_one_run(tmp_path: Path, tiny_base: Path) -> None:
    parts, whole = load_model(str(tiny_base)), load_model(str(tiny_base))
    for number, start in enumerate(({}, None)):
        kept = moments_in(tmp_path / "moments") if start is None else start
        keeper = KeptMoments(lambda kept=kept: kept, tmp_path / "moments", LINEAGE)
        trained(parts.model, parts.tokenizer, tmp_path / f"part{number}", 2, keeper)
    trained(
        whole.model, whole.tokenizer, tmp_path / "whole", 4, KeptMoments(dict, tmp_path / "other", LINEAGE)
    )
    expected = model_tensors(whole.model)
    for name, tensor in model_tensors(parts.model).items():
        assert torch.equal(tensor, expected[name]), name
    assert int(moments_in(tmp_path / "moments")["step"]) == 4


def test_moments_of_another_shape_are_refused_before_the_first_step(tmp_path: Path, tiny_base: Path) -> None:
    loaded = load_model(str(tiny_base))
    name = next(iter(model_tensors(loaded.model)))
    start = {"step": torch.ones(1), f"exp_avg/{name}": torch.ones(3)}
    with pytest.raises(GymError, match=f"the saved moment exp_avg of '{name}' has shape \\[3\\]") as caught:
        trained(
            loaded.model,
            loaded.tokenizer,
            tmp_path / "run",
            1,
            KeptMoments(lambda: start, tmp_path / "moments", LINEAGE),
        )
    assert caught.value.code is ErrorCode.STATE_CORRUPT


class Killed(BaseException):
    """A crash after the last checkpoint."""


class KilledAtTheEnd(KeptMoments):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise Killed


def test_moments_of_the_last_step_are_there_after_a_crash_past_the_last_checkpoint(
    tmp_path: Path, tiny_base: Path
) -> None:
    loaded, path = load_model(str(tiny_base)), tmp_path / "moments"
    with pytest.raises(Killed):
        trained(loaded.model, loaded.tokenizer, tmp_path / "run", 2, KilledAtTheEnd(dict, path, LINEAGE))
    again = load_model(str(tiny_base))
    trained(again.model, again.tokenizer, tmp_path / "run", 2, KeptMoments(dict, path, LINEAGE))
    assert int(moments_in(path)["step"]) == 2


def test_a_run_that_stops_before_its_last_step_writes_no_moments(tmp_path: Path, tiny_base: Path) -> None:
    loaded, path = load_model(str(tiny_base)), tmp_path / "moments"

    def stop(step: int, total: int, loss: float) -> None:
        raise Killed

    keeper = KeptMoments(dict, path, LINEAGE)
    with pytest.raises(Killed):
        trained(loaded.model, loaded.tokenizer, tmp_path / "run", 3, keeper, stop)
    assert not path.exists()
