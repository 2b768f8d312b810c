"""Longer rows than the model was trained on: its rotary frequencies are scaled before training."""

from __future__ import annotations

from typing import Any

from gym_fed.base.modeling.rope import scale_rope
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.features.base import Feature


class RopeScaling(Feature):
    """Stays in the result: a model folder has it in its config, an adapter's folder in ``base_changes.json``."""

    tried = "yes"

    per_example = True

    def apply(self, model: Any, config: TrainingConfig) -> None:
        assert config.rope_scaling is not None  # the feature is on
        scale_rope(model, config.rope_scaling.model_dump())
