"""Scaling of rotary frequencies before training, for rows longer than the model was trained on."""

from __future__ import annotations

from typing import Any

from gym_fed.base.modeling.rope import scale_rope
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.features.base import Feature


class RopeScaling(Feature):
    """Scales the model; a model folder has the change in its config, an adapter's in ``base_changes.json``."""

    tried = "yes"

    per_example = True

    def apply(self, model: Any, config: TrainingConfig) -> None:
        assert config.rope_scaling is not None  # the feature is on
        scale_rope(model, config.rope_scaling.model_dump())
