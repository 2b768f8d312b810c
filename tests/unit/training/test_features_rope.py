"""Longer rotary positions: beyond the old limit the loss is lower, and the result carries them to every loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gym_fed.base.modeling.rope import scale_rope
from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.data import generate
from gym_fed.training.trainer import Trainer

KINDS: list[dict[str, Any]] = [
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 2.0},
    {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
]


def ids(length: int) -> torch.Tensor:
    return torch.randint(40, 90, (1, length), generator=torch.Generator().manual_seed(0))


def config(folder: Path, **changes: Any) -> TrainingConfig:
    values = {
        "model": "gym-nano",
        "output_dir": folder,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "device": "cpu",
        "num_threads": 1,
    }
    return TrainingConfig(**{**values, **changes})


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: s["type"])
def test_every_type_changes_the_model_and_survives_training_and_loading(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    plain = load_model("gym-nano").model
    result = Trainer(config(tmp_path / "run", rope_scaling=settings, learning_rate=1e-9)).train(
        generate("copy", 8)
    )
    limit = plain.config.max_position_embeddings
    long = ids(limit + 60)
    logits = result.model(long).logits
    assert torch.isfinite(logits).all()
    assert (logits - plain(long).logits).abs().max() > 0.1
    loaded = load_model(str(tmp_path / "run")).model
    torch.testing.assert_close(loaded(long).logits, logits)
    assert loaded.config.rope_parameters["rope_type"] == settings["type"]
    assert loaded.config.max_position_embeddings == (limit if settings["type"] == "dynamic" else 2 * limit)


def test_an_adapter_is_loaded_on_a_base_scaled_as_it_was_trained(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", finetuning="lora", rope_scaling={"type": "yarn", "factor": 2.0})
    result = Trainer(settings).train(generate("copy", 8))
    loaded = load_model(str(tmp_path / "run")).model
    assert loaded.config.max_position_embeddings == 512
    torch.testing.assert_close(loaded(ids(300)).logits, result.model(ids(300)).logits)
    merged = Trainer(config(tmp_path / "full", model=str(tmp_path / "run"))).train(generate("copy", 8))
    assert merged.model.config.rope_parameters["rope_type"] == "yarn"
    assert load_model(str(tmp_path / "full")).model.config.max_position_embeddings == 512
    (tmp_path / "run/base_changes.json").write_text("{}")
    with pytest.raises(GymError, match=r"base_changes\.json cannot be read"):
        load_model(str(tmp_path / "run"))


@pytest.mark.slow  # two runs
def test_rows_beyond_the_old_limit_are_read_better(tmp_path: Path) -> None:
    """The second half of a row repeats the first, twice as far away as the model ever saw it."""
    from gym_fed.config.train.training import ModelInit
    from gym_fed.training.model.loading import init_model

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = ModelInit(
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32,
    )
    model, _ = init_model(sizes, seed=0, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(220):
        half = torch.randint(40, 56, (32, 16))
        row = torch.cat([half, half], 1)
        labels = row.clone()
        labels[:, :16] = -100
        loss = model(row, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    half = torch.randint(40, 56, (16, 32))
    row = torch.cat([half, half], 1)
    labels = row.clone()
    labels[:, :32] = -100
    with torch.no_grad():
        before = model(row, labels=labels).loss.item()
        scale_rope(model, {"type": "linear", "factor": 2.0})
        after = model(row, labels=labels).loss.item()
    assert after < before - 0.3, (before, after)


def test_a_model_scaled_already_is_not_scaled_again_silently(tmp_path: Path) -> None:
    model = load_model("gym-nano").model
    scale_rope(model, {"type": "linear", "factor": 2.0})
    with pytest.raises(GymError, match=r"already scaled \(linear, factor 2"):
        scale_rope(model, {"type": "yarn", "factor": 2.0})
    with pytest.raises(GymError, match="short_factor: has 1 divisor, but the model has 16 frequencies"):
        scale_rope(
            load_model("gym-nano").model,
            {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
        )
