"""Scale RoPE before training, for rows longer than those that the model was trained on."""

from __future__ import annotations

from typing import Any

from gym_fed.base.modeling.rope import scale_rope
from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.features.base import Feature


class RopeScaling(Feature):
    """Scales the model; the change is saved in a model's config, or in an adapter's ``base_changes.json``."""

    tried = "yes"

    per_example = True

    def apply(self, model: Any, config: TrainingConfig) -> None:
        assert config.rope_scaling is not None  # the feature is on
        scale_rope(model, config.rope_scaling.model_dump())
