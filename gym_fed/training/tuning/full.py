"""Full fine-tuning: train every weight."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning, refuse_quantization


class Full(Tuning):
    """Trains all weights of the model in place."""

    tried = "learning, saving, bit-exact resume"

    is_adapter = False
    default_learning_rate = 1e-5
    trains_all = True
    pipelines = True
    on_quantized = False
    per_example = True
    federates = True

    def check(self, config: TrainingConfig) -> None:
        refuse_quantization(config, "quantised weights cannot be trained")

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        model.requires_grad_(True)  # a model stays frozen after an adapter was merged or removed
        return model

    def save(self, model: Any, config: TrainingConfig, folder: Path, base_name: str | None) -> None:
        """Write the whole model, in ``save_dtype``."""
        import torch

        saved = model
        if config.save_dtype is not None and config.save_dtype != config.dtype:
            saved = copy.deepcopy(model).to(getattr(torch, config.save_dtype))
        saved.save_pretrained(str(folder))
