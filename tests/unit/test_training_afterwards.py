"""A trained model is merged with others' work, and written as a model, an adapter or a delta."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed import Trainer, TrainingConfig
from gym_fed.data import generate
from gym_fed.delta import BaseSpec, DeltaFile, apply_delta
from gym_fed.errors import ErrorCode, GymError
from gym_fed.models import load_model
from gym_fed.quantization import AggregationMethod, DeltaSoupConfig

ROWS = generate("copy", 40)
MEAN = DeltaSoupConfig(
    method=AggregationMethod.MEAN, codec={"codec": "dense", "dense_dtype": "float32", "error_feedback": False}
)


def trained(base: Path, folder: Path, **changes: Any) -> Trainer:
    settings = {
        "model": str(base),
        "output_dir": folder,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 48,
        "device": "cpu",
        "num_threads": 1,
        "save_final": False,
    }
    trainer = Trainer(TrainingConfig(**{**settings, **changes}))
    trainer.train(ROWS)
    return trainer


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([[5, 6, 7, 8]])).logits
    return out


def test_the_soup_of_two_is_their_mean_and_becomes_the_result(tiny_base: Path, tmp_path: Path) -> None:
    mine, yours = (trained(tiny_base, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert mine.result is not None
    assert yours.result is not None
    before = [{k: v.clone() for k, v in t.result.model.state_dict().items()} for t in (mine, yours)]
    soup = mine.apply_deltasoup({"you": yours.result.model}, MEAN)
    assert soup.merged == ("self", "you")
    after = mine.result.model.state_dict()
    for name, value in after.items():
        torch.testing.assert_close(value, (before[0][name] + before[1][name]) / 2, atol=1e-2, rtol=1e-2)
    moved = max((after[name] - before[0][name]).abs().max().item() for name in after)
    assert moved > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"finetuning": "lora"},
        {"finetuning": "lora", "lora": {"use_dora": True}},
        {"finetuning": "oft", "oft": {"oft_block_size": 4}},
    ],
    ids=["full", "lora", "dora", "oft"],
)
def test_what_is_exported_computes_what_was_trained(
    tiny_base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer = trained(tiny_base, tmp_path / "run", **changes)
    assert trainer.result is not None
    wanted = logits(trainer.result.model)
    folder = trainer.export(tmp_path / "whole")
    torch.testing.assert_close(logits(load_model(str(folder)).model), wanted, atol=1e-4, rtol=1e-4)
    exact = {"codec": "dense", "dense_dtype": "float32", "factors": "float32", "error_feedback": False}
    from gym_fed.config.delta import CodecPolicy

    delta = trainer.export(tmp_path / "mine.gymdelta", "delta", CodecPolicy(**exact))
    base = load_model(str(tiny_base)).model
    with DeltaFile.open(delta, BaseSpec.of(base, "base")) as opened:
        apply_delta(base, opened)
    torch.testing.assert_close(logits(base), wanted, atol=1e-4, rtol=1e-4)
    if changes:
        adapter = trainer.export(tmp_path / "adapter", "adapter")
        torch.testing.assert_close(logits(load_model(str(adapter)).model), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(trainer.result.model), wanted)


def test_refusals_name_what_is_missing(tiny_base: Path, tmp_path: Path) -> None:
    untrained = Trainer(TrainingConfig(model=str(tiny_base), output_dir=tmp_path / "never"))
    with pytest.raises(GymError, match="nothing is trained yet"):
        untrained.export(tmp_path / "out")
    trainer = trained(tiny_base, tmp_path / "run")
    with pytest.raises(GymError, match="there is no adapter"):
        trainer.export(tmp_path / "out", "adapter")
    with pytest.raises(GymError, match="format 'gguf' is unknown"):
        trainer.export(tmp_path / "out", "gguf")  # type: ignore[arg-type]
    (tmp_path / "out").mkdir()
    with pytest.raises(GymError) as caught:
        trainer.export(tmp_path / "out")
    assert caught.value.code is ErrorCode.FILE_EXISTS
    with pytest.raises(GymError, match="'self' is this trainer's own work"):
        trainer.apply_deltasoup({"self": "x.gymdelta"})
