"""A run of a model that reads images is exported, also from a type without a text-only class in transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.export.formats.base import Options
from gym_fed.export.run import export
from gym_fed.export.source import open_source
from gym_fed.training.trainer import Trainer
from tests.support.vision_models import vision_model

ROWS = [{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}] * 2


def test_a_lora_run_of_a_vision_model_is_merged_and_exported(tmp_path: Path) -> None:
    base = vision_model("llava", tmp_path / "base")
    config = TrainingConfig(
        model=str(base), output_dir=tmp_path / "run", finetuning="lora", max_steps=1, learning_rate=1e-2,
        per_device_train_batch_size=2, max_length=64, device="cpu", num_threads=1, assistant_only_loss=False,
    )  # fmt: skip
    result = Trainer(config).train(ROWS)
    export(open_source(str(tmp_path / "run")), "huggingface", tmp_path / "merged", Options(), check=False)
    ids = torch.arange(3, 15)[None]
    with torch.inference_mode():
        wanted = result.model(input_ids=ids).logits
        found = load_model(str(tmp_path / "merged"), images=True).model(input_ids=ids).logits
        before = load_model(str(base), images=True).model(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert (wanted - before).abs().max() > 1e-3
